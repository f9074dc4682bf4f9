"""Conversations as tokens: turns are appended without tokenizing again, and trained tokens are the engine's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.config.models.roles import TrajectoryStrategy
from rlrun.environments.protocol import Message, Tool
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation, RolloutError, UnplayablePromptError
from rlrun.trainer.modeling.tiny_model import CHAT_TEMPLATE, make_tokenizer

# Chat templates: ChatML ends a turn with a newline after the end token, one template trims, and one has no end token.
CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = (
    "<bos>{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'].strip() + ' ' }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"tiny": CHAT_TEMPLATE, "chatml": CHATML, "trimming": TRIMMING, "endless": ENDLESS}
EOS = 2


def make_chat(template: str = CHAT_TEMPLATE) -> ChatTokens:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatTokens(tokenizer)


CHATS = {name: make_chat(template) for name, template in TEMPLATES.items()}


class Engine:
    """Engine that returns scripted replies and records its prompts."""

    def __init__(self, chat: ChatTokens, replies: Sequence[str], *, stop: bool = True) -> None:
        self.chat, self.replies, self.stop = chat, list(replies), stop
        self.prompts: list[list[int]] = []
        self.seen: list[list[int]] = []
        self.stops: list[tuple[str, ...]] = []
        self.version = 0

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        said = self.replies.pop(0)
        self.stops.append(tuple(stop))
        tokens = [*self.chat._tokenize_text(said)] + [EOS] * self.stop
        finish = "stop" if len(tokens) <= max_tokens and self.stop else "length"
        tokens = tokens[:max_tokens]
        self.prompts.append(list(token_ids))
        self.seen.append([*token_ids, *tokens])
        versions = [self.version + (i > 1) for i in range(len(tokens))]
        self.version += 1
        return Completion(tokens, [-(token + 1) / 100 for token in tokens], versions, finish)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def talk(engine: Engine, turns: Sequence[str], *, seq_len: int = 4096, max_tokens: int = 64) -> Conversation:
    conversation = Conversation(engine, engine.chat, seq_len=seq_len, max_tokens=max_tokens)
    messages: list[Message] = []
    for turn in turns:
        messages.append(user(turn))
        reply = await conversation.complete(messages)
        messages.append(reply.message)
    return conversation


words = st.text(st.sampled_from("abc +-=\n"), min_size=1, max_size=12)


@pytest.mark.parametrize("template", list(TEMPLATES))
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=5), max_tokens=st.integers(2, 20))
def test_recorded_tokens_equal_engine_tokens(template: str, turns: list[tuple[str, str]], max_tokens: int) -> None:
    engine = Engine(CHATS[template], [reply for _, reply in turns])
    conversation = asyncio.run(talk(engine, [said for said, _ in turns], max_tokens=max_tokens))
    (recorded,) = conversation.recorded()
    assert recorded.input_ids.tolist() == engine.seen[-1]
    position = 0
    for prompt, seen in zip(engine.prompts, engine.seen, strict=True):
        assert seen[: len(prompt)] == prompt
        assert engine.seen[-1][: len(seen)] == seen  # earlier tokens never change
        assert not recorded.loss_mask[position : len(prompt)].any()
        assert recorded.loss_mask[len(prompt) : len(seen)].all()
        position = len(seen)
    sampled = recorded.input_ids[recorded.loss_mask]
    assert recorded.logprobs[recorded.loss_mask].tolist() == pytest.approx((-(sampled + 1) / 100).tolist())
    assert (recorded.versions >= 0).tolist() == recorded.loss_mask.tolist()
    assert (recorded.logprobs[~recorded.loss_mask] == 0).all()


@pytest.mark.parametrize("template", ["tiny", "chatml", "endless"])
async def test_continued_conversation_equals_template_output(template: str) -> None:
    chat = CHATS[template]
    engine = Engine(chat, ["xy", "z"])
    await talk(engine, ["a", "b"])
    messages = [user("a"), {"role": "assistant", "content": "xy"}, user("b")]
    expected = list(chat.opening(messages)[1])
    if template == "endless":  # the sampled end token is present, which this template does not write
        assert [t for t in engine.prompts[1] if t != EOS] == expected
    else:
        assert engine.prompts[1] == expected


async def test_truncated_reply_gets_unmasked_template_end() -> None:
    engine = Engine(CHATS["tiny"], ["abcdef", "z"])
    conversation = Conversation(engine, engine.chat, seq_len=100, max_tokens=3)
    reply = await conversation.complete([user("a")])
    assert (reply.text, reply.truncated, reply.finish_reason) == ("abc", True, "length")
    await conversation.complete([user("a"), reply.message, user("b")])
    (recorded,) = conversation.recorded()
    eos = [i for i, token in enumerate(recorded.input_ids) if token == EOS]
    assert [bool(recorded.loss_mask[i]) for i in eos] == [False, True]
    assert conversation.truncated


async def test_different_history_starts_another_sample() -> None:
    engine = Engine(CHATS["tiny"], ["x", "y", "z"])
    conversation = Conversation(engine, engine.chat, seq_len=100, max_tokens=8)
    first = await conversation.complete([user("a")])
    await conversation.complete([user("summary"), user("b")])
    await conversation.complete([user("a"), first.message, user("c")])
    recorded = conversation.recorded()
    assert [r.input_ids.tolist() for r in recorded] == [engine.seen[2], engine.seen[1]]


async def test_edited_reply_starts_another_sample() -> None:
    engine = Engine(CHATS["tiny"], ["x", "y"])
    conversation = Conversation(engine, engine.chat, seq_len=100, max_tokens=8)
    await conversation.complete([user("a")])
    await conversation.complete([user("a"), {"role": "assistant", "content": "edited"}, user("c")])
    assert len(conversation.recorded()) == 2


async def test_sample_stays_within_seq_len_and_reports_truncation() -> None:
    engine = Engine(CHATS["tiny"], ["abcdefgh"] * 9)
    conversation = Conversation(engine, engine.chat, seq_len=24, max_tokens=64)
    messages: list[Message] = []
    replies = []
    for _ in range(4):
        messages.append(user("go"))
        replies.append(await conversation.complete(messages))
        messages.append(replies[-1].message)
    (recorded,) = conversation.recorded()
    assert len(recorded.input_ids) <= 24
    assert recorded.loss_mask[-1]
    assert [r.truncated for r in replies] == [False, True, True, True]
    assert replies[-1].text == ""


async def test_prompt_without_room_is_refused_with_lengths() -> None:
    conversation = Conversation(Engine(CHATS["tiny"], []), CHATS["tiny"], seq_len=8, max_tokens=8)
    with pytest.raises(RolloutError, match=r"13 tokens.*seqLen \(8\)"):
        await conversation.complete([user("abcdefghij")])
    with pytest.raises(RolloutError, match="did not sample a token"):
        conversation.recorded()


async def test_stop_string_ends_reply_and_is_trained() -> None:
    engine = Engine(CHATS["tiny"], ["ab==cd"])
    conversation = Conversation(engine, engine.chat, seq_len=64, max_tokens=32)
    reply = await conversation.complete([user("a")], stop=["=="])
    assert (reply.text, reply.finish_reason) == ("ab", "stop")
    (recorded,) = conversation.recorded()
    assert engine.chat.decode(recorded.input_ids[recorded.loss_mask].tolist()) == "ab=="
    assert engine.stops == [("==",)], "the engine ends there as well, and samples nothing in vain"


async def test_stop_string_starts_no_branch() -> None:
    """The template does not write the stop string again, because it is not part of the message."""
    engine = Engine(CHATS["tiny"], ["ab==", "cd"], stop=False)
    conversation = Conversation(engine, engine.chat, seq_len=64, max_tokens=32, strategy="branching", stop=["=="])
    reply = await conversation.complete([user("a")])
    await conversation.complete([user("a"), reply.message, user("b")])
    (recorded,) = conversation.recorded()
    assert engine.chat.decode(recorded.input_ids[recorded.loss_mask].tolist()) == "ab==cd"


async def test_prefilled_reply_is_refused() -> None:
    engine = Engine(CHATS["tiny"], ["ab"])
    conversation = Conversation(engine, engine.chat, seq_len=64, max_tokens=32)
    prefilled = "the last message has the role assistant, and prefilled replies are unsupported"
    with pytest.raises(UnplayablePromptError, match=prefilled) as found:
        await conversation.complete([user("a"), {"role": "assistant", "content": "b"}])
    assert found.value.reason == "template"
    reply = await conversation.complete([user("a")])
    with pytest.raises(RolloutError, match=prefilled) as later:
        await conversation.complete([user("a"), reply.message, user("b"), {"role": "assistant", "content": "b"}])
    assert not isinstance(later.value, UnplayablePromptError)


@pytest.mark.parametrize("missing", ["logprobs", "versions"])
async def test_token_without_logprob_or_version_is_refused(missing: str) -> None:
    async def generate(token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        whole: dict[str, Any] = {"token_ids": [9, 9], "logprobs": [-1.0, -1.0], "versions": [1, 1]}
        whole[missing] = whole[missing][:1]
        return Completion(finish_reason="stop", **whole)

    conversation = Conversation(generate, CHATS["tiny"], seq_len=64, max_tokens=8)
    with pytest.raises(RolloutError, match="2 tokens came with"):
        await conversation.complete([user("a")])


def test_untrainable_chat_templates_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="chat template"):
        ChatTokens(tokenizer)
    with pytest.raises(TemplateError, match="drops an assistant message"):
        make_chat("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}")


def test_template_end_token_is_a_stop_token() -> None:
    assert make_chat(CHATML.replace("<eos>", "<tool>")).stop_token_ids == (2, 7)
    assert make_chat().stop_token_ids == (2,)


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
async def test_equal_prompts_are_rendered_once_and_not_shared(
    tokenizer_folder: Path, strategy: TrajectoryStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatTokens.load(tokenizer_folder)
    rendered: list[object] = []
    render = ChatTokens.prompt

    def count(self: ChatTokens, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        rendered.append(messages)
        return render(self, messages, tools)

    monkeypatch.setattr(ChatTokens, "prompt", count)

    async def prompt(message: Message) -> list[int]:
        engine = Engine(chat, ["z"])
        conversation = Conversation(engine, chat, seq_len=200, max_tokens=100, strategy=strategy)
        await conversation.complete([message])
        return engine.prompts[0]

    first = await prompt(user("<abc>"))
    chat.opening([user("<abc>")])[1].append(-1)
    assert await prompt(user("<abc>")) == first
    assert len(rendered) == 1
    assert await prompt(user("<abd>")) != first
    assert len(rendered) == 2
    odd: Message = user("<abc>") | {"seen": object()}
    assert await prompt(odd) == await prompt(odd) == first
    assert len(rendered) == 4, "what is no JSON is rendered each time"
