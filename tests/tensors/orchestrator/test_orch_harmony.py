"""GPT-OSS channels: final text, separate thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlrun.environments.protocol import Message, Tool
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.rollouts.message_forms import ReplyParts
from rlrun.orchestrator.rollouts.player import HarmonyParser, parse_channels, speaks_harmony
from tests.support.chat_templates import real_tokenizer

ADD: Tool = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
FINAL = f"{THOUGHT}<|channel|>final<|message|>It is 4."
CALL = f'{THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": 2}}'


def chat_of(name: str) -> ChatTokens:
    tokenizer, ends = real_tokenizer(name)
    return ChatTokens(tokenizer, ends=ends)


class Engine:
    """Engine that returns scripted replies in whole tokens and records its prompts."""

    def __init__(self, *replies: str) -> None:
        self.tokenizer = real_tokenizer("gpt_oss")[0]
        self.replies = list(replies)
        self.prompts: list[str] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        self.prompts.append(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))
        said = self.replies.pop(0)
        ids = self.tokenizer(said, add_special_tokens=False).input_ids
        finish = "stop" if said.endswith(("<|return|>", "<|call|>")) else "length"
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), finish)


def conversation(engine: Engine) -> Conversation:
    chat = chat_of("gpt_oss")
    return Conversation(engine, chat, seq_len=100_000, max_tokens=99, parse=HarmonyParser(chat), parse_all=True)


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        (FINAL, ReplyParts("It is 4.", (), "Let me think.", "It is 4.")),
        ("<|channel|>final<|message|>It is 4.", ReplyParts("It is 4.", (), None, "It is 4.")),
        (CALL, ReplyParts("", (("add", '{"a": 2}'),), "Let me think.", "")),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}',
            ReplyParts("", (("add", '{"a": 2}'),), None, ""),
        ),
        (
            "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>",
            ReplyParts("", (("add", "{}"),), "I will add.", ""),
        ),
        ("no channel at all", ReplyParts()),
    ],
)
def test_harmony_reply_is_split_by_channel(spelled: str, said: ReplyParts) -> None:
    assert parse_channels(spelled) == said


async def test_harmony_reply_text_is_the_final_channel() -> None:
    engine = Engine(f"{FINAL}<|return|>", f"{FINAL}<|return|>")
    played = conversation(engine)
    messages: list[Message] = [{"role": "user", "content": "2+2?"}]
    reply = await played.complete(messages)
    assert (reply.text, reply.reasoning) == ("It is 4.", "Let me think.")
    assert reply.message == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Let me think."}
    await played.complete([*messages, reply.message, {"role": "user", "content": "Sure?"}])
    assert len(played.recorded()) == 1
    assert engine.prompts[1].endswith(f"{FINAL}<|return|><|start|>user<|message|>Sure?<|end|><|start|>assistant"), (
        "one end of the turn, the sampled one"
    )


async def test_harmony_call_and_result_extend_the_same_sample() -> None:
    engine = Engine(f"{CALL}<|call|>", f"{FINAL}<|return|>")
    played = conversation(engine)
    messages: list[Message] = [{"role": "user", "content": "2+2?"}]
    reply = await played.complete(messages, tools=[ADD])
    (call,) = reply.tool_calls
    assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    assert (await played.complete([*messages, reply.message, result], tools=[ADD])).text == "It is 4."
    assert engine.prompts[1].endswith(
        f'{CALL}<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    )
    assert len(played.recorded()) == 1


async def test_truncated_harmony_reply_has_no_calls() -> None:
    reply = await conversation(Engine(CALL)).complete([{"role": "user", "content": "a"}], tools=[ADD])
    assert (reply.text, reply.truncated, reply.tool_calls) == ("", True, ())
    reply = await conversation(Engine(f"{THOUGHT}<|channel|>final<|message|>It")).complete(
        [{"role": "user", "content": "a"}]
    )
    assert (reply.text, reply.truncated, reply.reasoning) == ("It", True, "Let me think.")


@pytest.mark.parametrize(
    ("name", "speaks"), [("gpt_oss", True), ("qwen3", False), ("llama3_1", False), ("gemma4", False)]
)
def test_harmony_format_is_detected_by_its_tokens(name: str, speaks: bool) -> None:
    assert speaks_harmony(chat_of(name)) is speaks
