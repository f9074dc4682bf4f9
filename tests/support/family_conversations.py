"""Conversations with the chat templates of real models, played through the product with a scripted engine.

`play` judges one cell of the table in `docs/models.md`: the engine's input, the trained tokens, and whether each prompt
equals the template's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rlrun.config.models.roles import TrajectoryStrategy
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.rollouts.message_forms import ParseReply, ReplyParts, parse_text
from rlrun.orchestrator.rollouts.player import HarmonyParser
from tests.support.chat_templates import FAMILIES, real_tokenizer

Kind = Literal["chat", "thoughts", "tools"]
KINDS: tuple[Kind, ...] = ("chat", "thoughts", "tools")
STRATEGIES: tuple[TrajectoryStrategy, ...] = ("interleaved", "branching")
ADD: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "a"}},
            "required": ["a"],
        },
    },
}
CALL_AS_TEXT = '<tool_call>{"name": "add", "arguments": {"a": 0}}</tool_call>'
THOUGHT = "Thought."
USER, CALL, TALK = "user", "call", "talk"
TURNS: dict[Kind, tuple[str, ...]] = {
    "chat": (TALK, USER, TALK, USER, TALK),
    "thoughts": (TALK, USER, CALL, TALK, USER, TALK),
    "tools": (CALL, TALK, USER, CALL, CALL, TALK),
}
"""Replies and questions after the first question; a call is followed by its result."""


@dataclass(frozen=True)
class Cell:
    """Result of one conversation.

    Attributes:
        error: reason why it is not played; empty if it is.
        ids: whether the recorded tokens are those of the engine's input, and the trained ones those that it sampled.
        appended: whether the text after each reply is the template's, the end of the turn included once.
        whole: whether each later prompt equals the template's completely.
        samples: training samples of the conversation.
    """

    error: str = ""
    ids: bool = False
    appended: bool = False
    whole: bool = False
    samples: int = 0


@cache
def chat_of(name: str, kind: Kind = "chat") -> ChatTokens:
    """Return the tokens of a family's template, called with its arguments for thoughts."""
    tokenizer, ends = real_tokenizer(name)
    chat = ChatTokens(tokenizer, ends=ends)
    return chat.called_with(dict(FAMILIES[name].thinks_with)) if kind == "thoughts" else chat


def spell(name: str, ids: Sequence[int]) -> str:
    """Return the text of tokens, special tokens included."""
    return str(real_tokenizer(name)[0].decode(list(ids), skip_special_tokens=False))


def ids_of(name: str, text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(real_tokenizer(name)[0](text, add_special_tokens=False).input_ids)


@cache
def spelled_call(name: str) -> str:
    """Return a call of `add` as the family's model samples it, without thoughts and end."""
    family, chat = FAMILIES[name], chat_of(name)
    if family.form != "native":
        return CALL_AS_TEXT
    question: Message = {"role": "user", "content": "U"}
    function = {"name": "add", "arguments": '{"a": 0}'}
    call = {"id": "call00000", "type": "function", "function": function}
    reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    written, prompt = chat.template.write([question, reply], [ADD]), chat.prompt([question], [ADD])
    # A template that opens a thought in the prompt writes the call after an empty thought, or without any.
    common = next((n for n, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    return written[common:].partition(family.call_end or family.end)[0]


class ScriptedEngine:
    """Engine that samples the replies of a conversation and can parse them."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind, self.family = name, kind, FAMILIES[name]
        self.turn = CALL
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        family, number = self.family, len(self.answers)
        thought = (family.thought or "").format(THOUGHT) if self.kind == "thoughts" else ""
        if self.turn == CALL:
            spelled = f"{thought}{spelled_call(self.name)}"
            end = family.call_end or family.end
        else:
            spelled, end = f"{thought}{family.head}R{number}", family.end
        answer = ids_of(self.name, spelled + end)
        self.prompts.append(list(token_ids))
        self.answers.append(answer)
        return Completion(answer, [-1.0] * len(answer), [0] * len(answer), "stop")

    async def parse(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
        """Parse a reply as the engine's parsers do."""
        thought = THOUGHT if self.kind == "thoughts" else None
        if self.turn == CALL:
            return ReplyParts("", (("add", '{"a": 0}'),), thought)
        content = f"R{len(self.answers) - 1}"
        return ReplyParts(content, (), thought, content)


async def play(name: str, kind: Kind, strategy: TrajectoryStrategy) -> Cell:
    """Play a conversation of several turns with a family's template."""
    family, chat, engine = FAMILIES[name], chat_of(name, kind), ScriptedEngine(name, kind)
    harmony = family.end == "<|return|>"
    as_text = kind == "tools" and family.form != "native"
    parse: ParseReply = HarmonyParser(chat) if harmony else parse_text if as_text else engine.parse
    conversation = Conversation(
        engine,
        chat,
        seq_len=100_000,
        max_tokens=64,
        strategy=strategy,
        parse=parse,
        parse_all=harmony or kind == "thoughts",
    )
    tools = [ADD] if CALL in TURNS[kind] else None
    messages: list[Message] = [{"role": "user", "content": "U"}]
    asked: list[list[Message]] = []
    for number, turn in enumerate(TURNS[kind]):
        if turn == USER:
            messages.append({"role": "user", "content": f"U{number}"})
            continue
        engine.turn = turn
        asked.append([*messages])
        try:
            reply = await conversation.complete(messages, tools=tools)
        except ValueError as error:
            return Cell(error=str(error))
        if problem := _unlike_said(engine, reply):
            return Cell(error=problem)
        messages.append(reply.message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"RESULT{number}"} for call in reply.tool_calls
        ]
    return _judge(engine, conversation, chat, asked, tools or ())


def _unlike_said(engine: ScriptedEngine, reply: Reply) -> str:
    """Return the difference between a reply and the scripted model's text; empty if there is none."""
    thought = THOUGHT if engine.kind == "thoughts" else None
    content = "" if engine.turn == CALL else f"R{len(engine.answers) - 1}"
    said = (reply.content if reply.content is not None else reply.text, len(reply.tool_calls), reply.reasoning)
    wanted = (content, int(engine.turn == CALL), thought)
    return "" if said == wanted else f"the environment gets {said}, not {wanted}"


def _judge(
    engine: ScriptedEngine,
    conversation: Conversation,
    chat: ChatTokens,
    asked: Sequence[Sequence[Message]],
    tools: Sequence[Tool],
) -> Cell:
    recorded = conversation.recorded()
    seen = [[*prompt, *answer] for prompt, answer in zip(engine.prompts, engine.answers, strict=True)]
    held = all(any(one.input_ids[: len(ids)].tolist() == ids for one in recorded) for ids in seen)
    trained = [id for one in recorded for id in one.input_ids[one.loss_mask].tolist()]
    appended = whole = True
    for number, messages in enumerate(asked[1:], 1):
        prompt, wanted = (
            spell(engine.name, engine.prompts[number]),
            _write(engine.name, chat, messages, tools, thinks=engine.kind == "thoughts"),
        )
        whole = whole and _one_end(engine, prompt) == wanted
        before = spell(engine.name, seen[number - 1])
        if not prompt.startswith(before):  # branching: the template has rewritten an earlier reply
            appended = appended and prompt == wanted
            continue
        end = spell(engine.name, engine.answers[number - 1][-1:])
        ends = (end, "<|end|>") if end == "<|return|>" else (end,)
        added = prompt[len(before) :]
        appended = appended and bool(added) and any(wanted.endswith(one + added) for one in ends)
    ids = held and trained == [id for answer in engine.answers for id in answer]
    return Cell("", ids, appended, whole, len(recorded))


def _write(name: str, chat: ChatTokens, messages: Sequence[Message], tools: Sequence[Tool], *, thinks: bool) -> str:
    """Return the template's own text of a conversation; for a template without tools, that of the conversation without
    them."""
    family = FAMILIES[name]
    if tools and family.form != "native":
        return chat.prompt(messages, tools)
    known = []
    for message in messages:
        thought = message.get("reasoning_content")
        calls = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        fields = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought) if thought else {}
        known.append(message | fields | ({"tool_calls": calls} if calls else {}))
    arguments = dict(family.thinks_with) if thinks else {}
    return str(
        real_tokenizer(name)[0].apply_chat_template(
            known, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **arguments
        )
    )


def _one_end(engine: ScriptedEngine, prompt: str) -> str:
    """Return a prompt with the end that Harmony's template writes after earlier replies, in place of the sampled end."""
    return prompt.replace("<|return|>", "<|end|>") if engine.family.end == "<|return|>" else prompt
