"""Taskset of verifiers 0.4 with tools on the real `Conversation`: chat template, token ids and the engine's tool parser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlrun.environments import load_environment, run_episode
from rlrun.environments.protocol import Tool
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.rollouts.message_forms import ReplyParts
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.waiting import UNREACHED_SECONDS

pytestmark = pytest.mark.usefixtures("tasksets", "no_network")

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }},{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat_tokens() -> ChatTokens:
    tokenizer: PreTrainedTokenizerFast = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return ChatTokens(tokenizer)


class Engine:
    """Engine that returns given replies token by token, and parses calls in its own format: `!name{arguments}`."""

    def __init__(self, chat: ChatTokens, replies: Sequence[str]) -> None:
        self.chat, self.replies = chat, list(replies)
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []
        self.parsed: list[list[str]] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        ids = [*self.chat.encode_appended(self.replies[len(self.said)]), self.chat.stop_token_ids[0]]
        self.asked.append(list(token_ids))
        self.said.append(ids)
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids), "stop")

    async def parse(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        self.parsed.append([tool["function"]["name"] for tool in tools])
        content, _, call = text.partition("!")
        name, brace, arguments = call.partition("{")
        return ReplyParts(content, ((name, brace + arguments),)) if call else ReplyParts()


async def test_tools_use_chat_template_and_engine_parser() -> None:
    chat = chat_tokens()
    replies = ['see!prices_of{"fruit": "fig"}', '!buy{"fruit": "fig", "count": 2}', "done"]
    engine = Engine(chat, replies)
    conversation = Conversation(engine, chat, seq_len=400, max_tokens=99, parse=engine.parse)
    env = load_environment("verifiers:vf-shop", {})
    task = next(t for t in [*env.tasks("train"), *env.tasks("eval")] if "fig" in t.prompt[0]["content"])
    _, score = await run_episode(env, task, conversation, timeout_seconds=UNREACHED_SECONDS)
    assert score.reward == 1.0
    assert engine.parsed == [["prices_of", "buy"]] * 3
    (sample,) = conversation.recorded()
    ids = sample.input_ids.tolist()
    assert chat.decode(ids) == "[prices_of,buy,]u:Buy 2 of fig.a:" + "a:".join(
        [f"{replies[0]}t:five", f"{replies[1]}t:2 fig", replies[2]]
    )
    assert ids == [*engine.asked[-1], *engine.said[-1]]
    sampled = [token for said in engine.said for token in said]
    assert sample.input_ids[sample.loss_mask].tolist() == sampled
    assert (sample.logprobs[sample.loss_mask] == -0.5).all()
    assert (sample.logprobs[~sample.loss_mask] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("{fig", "are not JSON"), ('["fig"]', "must be a JSON object"), ('{"fruit": "kiwi"}', "kiwi")],
)
async def test_invalid_tool_arguments_get_an_error_reply(arguments: str, says: str) -> None:
    chat = chat_tokens()
    engine = Engine(chat, ["x", "done"])

    async def parse(token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        return ReplyParts("", (("prices_of", arguments),)) if text == "x" else ReplyParts()

    conversation: Any = Conversation(engine, chat, seq_len=400, max_tokens=99, parse=parse)
    env = load_environment("verifiers:vf-shop", {})
    episode, _ = await run_episode(env, env.tasks("train")[0], conversation, timeout_seconds=UNREACHED_SECONDS)
    answer = next(m for m in episode.messages if m["role"] == "tool")
    assert answer["content"].startswith("error: ")
    assert says in answer["content"]


async def test_prompt_with_tool_calls_reaches_template() -> None:
    env = load_environment("verifiers:vf-few-shot", {})
    task = env.tasks("train")[0]
    chat = chat_tokens()
    engine = Engine(chat, [task.answer or ""])
    conversation = Conversation(engine, chat, seq_len=400, max_tokens=9)
    episode, score = await run_episode(env, task, conversation, timeout_seconds=UNREACHED_SECONDS)
    assert json.loads(task.prompt[2]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert '!add{"a": 1}' in chat.decode(engine.asked[0])
    assert episode.messages[: len(task.prompt)] == task.prompt
    assert score.reward == 1.0
