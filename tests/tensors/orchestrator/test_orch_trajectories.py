"""Training samples of episodes with many turns: each sampled token is trained once, with the ids and the context of
the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlrun.config.models.roles import TrajectoryStrategy
from rlrun.config.models.rollout import SamplingConfig
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.inference.client.completions import Completion, ParsedReply
from rlrun.inference.client.engine_client import EngineError, EngineUnavailableError
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation, RolloutError
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.trainer.modeling.character_tokenizer import CHARACTERS, SPECIAL_TOKENS
from rlrun.trainer.modeling.tiny_model import make_tokenizer

# Template like those of reasoning models with tools: functions in the system message, the results of a turn joined in
# one user message, calls written from their fields, thoughts removed after the next user message.
TOOLS_AND_THOUGHTS = (
    "{% if tools %}<system>{{ messages[0].content if messages[0].role == 'system' }}"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<eos>\n"
    "{% elif messages[0].role == 'system' %}<system>{{ messages[0].content }}<eos>\n{% endif %}"
    "{% set latest = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set latest.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<user>{{ m.content }}<eos>\n"
    "{% elif m.role == 'assistant' %}<assistant>"
    "{{ m.content if loop.index0 > latest.user else m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<eos>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<user>{% endif %}[{{ m.content }}]"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<eos>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
EOS = SPECIAL_TOKENS.index("<eos>")
STRATEGIES: tuple[TrajectoryStrategy, ...] = ("interleaved", "branching")


def make_merging_tokenizer() -> Any:
    """Characters and the merges `ab` and `abc`, which the engine below never samples, so tokenizing the text again
    gives other ids.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS, "ab", "abc"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("a", "b"), ("ab", "c")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[abc]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<system>", "<user>", "<assistant>", "<tool>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TOOLS_AND_THOUGHTS
    return fast


CHAT = ChatTokens(make_merging_tokenizer())
IDS = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}


@dataclass
class Engine:
    """Engine that returns scripted replies as single characters; the version of a token is the number of its call."""

    replies: list[str]
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        tokens = [*(IDS[c] for c in self.replies.pop(0)), EOS]
        finish = "stop" if len(tokens) <= max_tokens else "length"
        tokens = tokens[:max_tokens]
        call = len(self.prompts)
        self.prompts.append(list(token_ids))
        self.sampled.append(tokens)
        return Completion(tokens, [-call - i / 1000 for i in range(len(tokens))], [call] * len(tokens), finish)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(name: str = "calc", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(reply: Reply, text: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": c["id"], "content": text} for c in reply.tool_calls]


def check_samples(conversation: Conversation, engine: Engine, seq_len: int) -> int:
    """Check the invariants of samples and return their number."""
    recorded = conversation.recorded()
    found: list[int] = []
    for sample in recorded:
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        assert len(ids) == len(mask) == len(sample.logprobs) == len(sample.versions) <= seq_len
        assert [version >= 0 for version in sample.versions.tolist()] == mask
        position = 0
        while position < len(ids):
            if not mask[position]:
                assert sample.logprobs[position] == 0
                position += 1
                continue
            number = int(sample.versions[position])
            tokens = engine.sampled[number]
            end = position + len(tokens)
            assert engine.prompts[number] == ids[:position]  # exactly the context in which it was sampled
            assert ids[position:end] == tokens
            assert all(mask[position:end])
            assert set(sample.versions[position:end].tolist()) == {number}
            assert sample.logprobs[position:end].tolist() == pytest.approx(
                [-number - i / 1000 for i in range(len(tokens))]
            )
            found.append(number)
            position = end
    assert sorted(found) == list(range(len(engine.prompts)))  # every call, once
    return len(recorded)


letters = st.text(st.sampled_from("abc "), min_size=1, max_size=5)
said = st.one_of(
    letters,
    letters.map(lambda text: f"<think>{text}</think>{text}"),
    st.tuples(letters, letters).map(lambda two: two[0] + call(x=two[1])),
    letters.map(lambda text: f"<think>{text}</think>" + call(x=text) + call(x="b")),
    letters.map(lambda text: f"{text}<tool_call>{{{text}"),
)
TURNS = ("user", "user", "tool", "tool", "back", "reset", "rewrite", "again", "tools")
turns = st.lists(
    st.tuples(st.sampled_from(TURNS), letters, said, st.integers(0, 3)),
    min_size=1,
    max_size=9,
)


def next_messages(kind: str, text: str, pick: int, messages: list[Message], reply: Reply | None) -> list[Message]:
    """Return the next messages of a program that continues, edits or branches the conversation."""
    if reply is None:
        return [user(text)]
    whole = [*messages, reply.message]
    if kind == "tool" and reply.tool_calls:
        return [*whole, *results(reply, text)]
    if kind == "again":
        return messages
    if kind == "reset":
        return [{"role": "system", "content": text}, user("ab")]
    if kind == "back":
        replies = [i for i, message in enumerate(whole) if message["role"] == "assistant"]
        return [*whole[: replies[pick % len(replies)] + 1], user(text)]
    if kind == "rewrite":
        return [*messages, {"role": "assistant", "content": reply.message["content"] + "c"}, user(text)]
    return [*whole, user(text)]


async def converse(
    engine: Engine, strategy: TrajectoryStrategy, turns: Sequence[Any], seq_len: int, max_tokens: int
) -> Conversation:
    conversation = Conversation(engine, CHAT, seq_len=seq_len, max_tokens=max_tokens, strategy=strategy)
    messages: list[Message] = []
    reply: Reply | None = None
    tools: list[Tool] = [TOOL]
    for kind, text, _, pick in turns:
        messages = next_messages(kind, text, pick, messages, reply)
        if kind == "tools":
            tools = [] if tools else [TOOL]
        calls = len(engine.prompts)
        try:
            reply = await conversation.complete(json.loads(json.dumps(messages)), tools=tools)
        except RolloutError:
            assert reply is None
            break
        if strategy == "branching" and len(engine.prompts) > calls:
            # A finished model that gets the same messages through its chat template reads the same prompt.
            prompt = CHAT._tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)
            assert prompt == CHAT.prompt(messages, tools)
    return conversation


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=60, deadline=None)
@given(turns=turns, seq_len=st.sampled_from([120, 400, 4000]), max_tokens=st.sampled_from([3, 25, 200]))
def test_sampled_tokens_are_trained_once_in_their_context(
    strategy: TrajectoryStrategy, turns: list[Any], seq_len: int, max_tokens: int
) -> None:
    engine = Engine([reply for _, _, reply, _ in turns])
    conversation = asyncio.run(converse(engine, strategy, turns, seq_len, max_tokens))
    if engine.prompts:
        check_samples(conversation, engine, seq_len)


@settings(max_examples=40, deadline=None)
@given(turns=turns, max_tokens=st.sampled_from([3, 25, 200]))
def test_growing_interleaved_episode_is_one_sample(turns: list[Any], max_tokens: int) -> None:
    grows = [turn for turn in turns if turn[0] in ("user", "tool")] or [("user", "a", "b", 0)]
    engine = Engine([reply for _, _, reply, _ in grows])
    conversation = asyncio.run(converse(engine, "interleaved", grows, 4000, max_tokens))
    assert check_samples(conversation, engine, 4000) == 1


async def play(strategy: TrajectoryStrategy, replies: Sequence[str], *, seq_len: int = 4000) -> tuple[Any, ...]:
    engine = Engine(list(replies))
    return engine, Conversation(engine, CHAT, seq_len=seq_len, max_tokens=400, strategy=strategy)


@pytest.mark.parametrize(("strategy", "samples"), [("interleaved", 1), ("branching", 2)])
async def test_dropped_thoughts_stay_or_start_a_branch(strategy: Any, samples: int) -> None:
    engine, conversation = await play(strategy, [f"<think>a</think>{call(x='1')}", "<think>b</think>c", "ab"])
    messages = [user("go")]
    reply = await conversation.complete(messages, tools=[TOOL])
    assert [c["function"] for c in reply.tool_calls] == [{"name": "calc", "arguments": '{"x": "1"}'}]
    assert reply.message["content"] == "<think>a</think>"
    messages += [reply.message, *results(reply, "1")]
    reply = await conversation.complete(messages, tools=[TOOL])
    assert (
        engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    )  # a tool result continues the sample in both strategies
    await conversation.complete([*messages, reply.message, user("on")], tools=[TOOL])
    assert check_samples(conversation, engine, 4000) == samples
    text = CHAT._tokenizer.decode(engine.prompts[2])
    assert ("<think>" in text) == (strategy == "interleaved")


async def test_return_to_earlier_turn_trains_no_token_twice() -> None:
    engine, conversation = await play("interleaved", ["abab", "x", "y"])
    first = await conversation.complete([user("a")])
    await conversation.complete([user("a"), first.message, user("b")])
    await conversation.complete([user("a"), first.message, user("c")])
    one, two = conversation.recorded()
    kept = len(engine.prompts[0]) + 5
    assert two.input_ids[:kept].tolist() == one.input_ids[:kept].tolist()
    assert (one.loss_mask.sum(), two.loss_mask.sum()) == (5 + 2, 2)
    assert check_samples(conversation, engine, 4000) == 2


async def test_reformatted_call_arguments_match_the_same_call() -> None:
    engine, conversation = await play("interleaved", [call(x="1", y="2"), "b"])
    reply = await conversation.complete([user("a")], tools=[TOOL])
    anew = json.loads(json.dumps(reply.message)) | {"content": None, "refusal": None}
    anew["tool_calls"][0]["function"]["arguments"] = '{"y":"2","x":"1"}'
    await conversation.complete([user("a"), anew, *results(reply, "1")], tools=[TOOL])
    assert check_samples(conversation, engine, 4000) == 1


async def test_cancelled_call_leaves_conversation_unchanged() -> None:
    engine, conversation = await play("interleaved", ["a", "b"])
    reply = await conversation.complete([user("a")])
    messages = [user("a"), reply.message, user("b")]
    answer = engine.__call__

    async def never(token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        raise asyncio.CancelledError

    conversation._generate = never
    with pytest.raises(asyncio.CancelledError):
        await conversation.complete(messages)
    conversation._generate = answer
    await conversation.complete(messages)
    assert CHAT._tokenizer.decode(engine.prompts[1]) == CHAT.prompt(messages)
    assert check_samples(conversation, engine, 4000) == 1


async def test_branch_without_room_ends_the_episode() -> None:
    engine, conversation = await play("interleaved", ["a", "b"], seq_len=40)
    first = await conversation.complete([user("a")])
    long = [{"role": "system", "content": "b" * 60}, user("c")]
    reply = await conversation.complete(long)
    assert (reply.text, reply.truncated, reply.completion_tokens) == ("", True, 0)
    assert (await conversation.complete([*long, reply.message, user("d")])).truncated
    assert (await conversation.complete([*long, reply.message, user("e")])).truncated
    assert (await conversation.complete([user("a"), first.message, user("b" * 60)])).truncated
    assert not (
        await conversation.complete([user("a"), first.message, user("b")])
    ).truncated  # a prompt with room still continues
    assert check_samples(conversation, engine, 40) == 2
    assert conversation.truncated


async def test_calls_in_truncated_reply_are_ignored() -> None:
    engine = Engine([call(x="1") + "abc"])
    conversation = Conversation(engine, CHAT, seq_len=4000, max_tokens=len(call(x="1")) + 1)
    reply = await conversation.complete([user("a")], tools=[TOOL])
    assert (reply.truncated, reply.tool_calls, reply.text) == (True, (), call(x="1") + "a")


async def test_tools_are_written_as_text_without_template_support() -> None:
    chat = ChatTokens(make_tokenizer())
    messages = [
        user("a"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "calc", "arguments": '{"x": "1"}'}}],
        },
        {"role": "tool", "content": "2"},
    ]
    text = chat.prompt(messages, [TOOL])
    assert text.startswith("<bos><system>You can call these functions")
    assert '"name": "calc"' in text
    assert text.endswith(f"<user>a<assistant>{call(x='1')}<eos><tool>2<assistant>")


async def test_template_requiring_calls_before_results_is_continued() -> None:
    tokenizer = make_merging_tokenizer()
    tokenizer.chat_template = TOOLS_AND_THOUGHTS.replace(
        "{% elif m.role == 'tool' %}",
        "{% elif m.role == 'tool' %}{% if not loop.previtem.tool_calls and loop.previtem.role != 'tool' %}"
        "{{ raise_exception('a result without a call') }}{% endif %}",
    )
    chat = ChatTokens(tokenizer)
    engine = Engine([call(x="1"), "b"])
    conversation = Conversation(engine, chat, seq_len=4000, max_tokens=400)
    reply = await conversation.complete([user("a")], tools=[TOOL])
    messages = [user("a"), reply.message, *results(reply, "1")]
    await conversation.complete(messages, tools=[TOOL])
    assert chat._tokenizer.decode(engine.prompts[1]) == chat.prompt(messages, [TOOL])
    with pytest.raises(TemplateError, match="refuses the conversation: a result without a call"):
        await conversation.complete([user("a"), {"role": "tool", "content": "1"}], tools=[TOOL])


# ---- parsers of the engines


class Parser:
    """Engine that only parses replies."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[list[int]] = []

    async def parse(self, token_ids: Sequence[int], tools: Sequence[Tool], _arguments: Any = None) -> Any:
        self.asked.append(list(token_ids))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def session_of(*parsers: Parser) -> Session:
    replicas = [Replica(str(index), parser) for index, parser in enumerate(parsers)]  # type: ignore[arg-type]
    return Session(EnginePool(replicas, Signal()), SamplingConfig(), [EOS])


async def test_engine_parser_falls_back_to_another_engine() -> None:
    parser = Parser(ParsedReply("b", [("calc", '{"x": 1}')]))
    gone = Parser(EngineUnavailableError("gone"))
    engine = Engine(["ab?calc(1)"])
    conversation = Conversation(engine, CHAT, seq_len=400, max_tokens=90, parse=session_of(gone, parser).parse)
    reply = await conversation.complete([user("a")], tools=[TOOL])
    assert (reply.text, reply.message["content"]) == ("ab?calc(1)", "b")
    assert [call["function"] for call in reply.tool_calls] == [{"name": "calc", "arguments": '{"x": 1}'}]
    assert gone.asked == parser.asked == [[IDS[c] for c in "ab?calc(1)"]]  # without the end token


async def test_engine_reasoning_parser_runs_without_tools() -> None:
    parser = Parser(ParsedReply("b", [], "a"))
    conversation = Conversation(
        Engine(["ab"]), CHAT, seq_len=400, max_tokens=90, parse=session_of(parser).parse, parse_all=True
    )
    reply = await conversation.complete([user("a")])
    assert reply.message == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert (reply.text, reply.reasoning) == ("ab", "a")


@pytest.mark.parametrize(
    ("parsers", "error"),
    [
        ([], EngineUnavailableError),
        ([Parser(EngineUnavailableError("gone"))], EngineUnavailableError),
        ([Parser(EngineError("refused", 400)), Parser(ParsedReply("", []))], EngineError),
    ],
)
async def test_reply_that_no_engine_parses_is_an_error(parsers: list[Parser], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        await session_of(*parsers).parse([9], "a", [TOOL])
    assert type(raised.value) is error
