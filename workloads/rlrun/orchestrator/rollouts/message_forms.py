"""Parts of a reply, and the forms of messages that chat templates accept.

The parts are text, calls, and the thoughts before them. Environments and rows use OpenAI messages; templates read the
same calls, results and thoughts under other names and types.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Message, Tool
from rlrun.environments.tool_calls import arguments_of, parse_tool_calls


@dataclass(frozen=True)
class ReplyParts:
    """Parsed reply.

    Attributes:
        content: text without calls and thoughts. None: the complete text.
        calls: (name, arguments as JSON) in order.
        reasoning: thoughts, or None.
        text: text for people, if it differs from the tokens without special ones, otherwise None.
    """

    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None
    text: str | None = None

    def calls_as_messages(self, before: int) -> list[dict[str, object]]:
        """Return the calls as in OpenAI messages. `before` is the number of earlier calls in the conversation.

        All ids have nine letters and digits, because Mistral's templates refuse others.
        """
        return [
            {"id": f"call{before + index:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(self.calls)
        ]


class ParseReply(Protocol):
    """Parser of replies.

    Args:
        token_ids: reply without the token that ended it.
        text: reply without special tokens.
        tools: offered functions; empty for a parser of every reply.
    """

    async def __call__(self, token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts: ...


async def parse_text(token_ids: Sequence[int], text: str, tools: Sequence[Tool]) -> ReplyParts:
    """Parse calls in the text form of `environments.tool_calls`."""
    content, calls = parse_tool_calls(text)
    return (
        ReplyParts(content, tuple((name, json.dumps(arguments)) for name, arguments in calls))
        if calls
        else ReplyParts()
    )


PROBE_ARGUMENT, PROBE_RESULT = "@#argument#@", "@#result#@"
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Field names of a reply's thoughts in rows, in engine answers and in templates (the last one in GPT-OSS and LFM 2.5).
"""
_CALL_ID = "call_"


@dataclass(frozen=True)
class ToolForm:
    """Form of a tool turn.

    Attributes:
        native: whether the template gets tools, calls and results as messages; otherwise calls become text.
        arguments_as_text: whether arguments of a call are JSON text (DeepSeek V3) instead of the value.
        no_content: whether a reply with only calls has the content None (DeepSeek R1) instead of an empty text.
        named_results: whether a result has the name of its function (Mistral v2).
        short_ids: whether ids of calls must be nine letters and digits (Mistral v3); other ids are replaced.
        described_in: role of the first message, which describes the tools. None: the template describes them.
            Unused if native.
        results_as: role of a message with results. Unused if native.
    """

    native: bool = True
    arguments_as_text: bool = False
    no_content: bool = False
    named_results: bool = False
    short_ids: bool = False
    described_in: str | None = "system"
    results_as: str = "tool"


TOOL_FORMS = (
    *(
        ToolForm(True, text, empty, named, short)
        for text, empty, named, short in sorted(product((False, True), repeat=4), key=sum)
    ),
    *(
        ToolForm(False, described_in=first, results_as=role)
        for places in ((None,), ("system", "user"))
        for role in ("tool", "user")
        for first in places
    ),
)
"""Forms in the order of the detection."""
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "rlrun_probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}


def probe_call(argument: str = PROBE_ARGUMENT, *, calls: int = 1) -> Message:
    """Return a reply that calls the probe with an argument."""
    function = {"name": "rlrun_probe", "arguments": json.dumps({"text": argument})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"{_CALL_ID}{number}", "type": "function", "function": function} for number in range(calls)
        ],
    }


def probe_result(number: int = 0) -> Message:
    """Return the result of one of the probe's calls."""
    return {"role": "tool", "tool_call_id": f"{_CALL_ID}{number}", "content": PROBE_RESULT}


def native_form(messages: Sequence[Message], form: ToolForm) -> list[Message]:
    """Return messages with calls and results in the form of the template."""
    written: list[Message] = []
    names: dict[object, str] = {}
    for message in messages:
        calls = message.get("tool_calls") or ()
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        known = message
        if message.get("role") == "tool":
            if form.named_results and "name" not in message:
                known = known | {"name": names.get(message.get("tool_call_id"), "")}
            if form.short_ids:
                known = known | {"tool_call_id": short_id(message.get("tool_call_id"))}
        elif calls:
            content = message.get("content") or (None if form.no_content else "")
            known = message | {"content": content, "tool_calls": [_native_call(call, form) for call in calls]}
        written.append(known)
    return written


def _native_call(call: Mapping[str, Any], form: ToolForm) -> dict[str, Any]:
    arguments = arguments_of(call["function"])
    function = call["function"] | {
        "arguments": json.dumps(arguments, ensure_ascii=False) if form.arguments_as_text else arguments
    }
    return {**call, "function": function} | ({"id": short_id(call.get("id"))} if form.short_ids else {})


def short_id(id: object) -> str:
    """Return an id of nine letters and digits that depends only on the given id."""
    text = str(id or "")
    if re.fullmatch("[a-zA-Z0-9]{9}", text):
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]


def thought_of(message: Message) -> str:
    """Return the thoughts of a reply, or an empty text.

    Raises:
        ContentError: the thoughts are not text.
    """
    found = next((name for name in THOUGHT_FIELDS if message.get(name)), None)
    return "" if found is None else content_text(message[found], found)


def with_thought(message: Message, field: str) -> Message:
    """Return a reply with its thoughts in the field that the template reads.

    Raises:
        ContentError: the thoughts are not text.
    """
    if not (thought := thought_of(message)):
        return message
    return {name: value for name, value in message.items() if name not in THOUGHT_FIELDS} | {field: thought}
