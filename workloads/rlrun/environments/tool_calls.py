"""Calls of functions as text, for models whose engine or chat template knows no form of their own:

    <tool_call>{"name": "...", "arguments": {...}}</tool_call>

It is the form that many models are trained on (Hermes, Qwen). A call that is no such JSON stays in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rlrun.environments.protocol import Message, Tool

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_DESCRIPTION = """You can call these functions; each line is one function as JSON:
{tools}
To call one, write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>. Its result is the next message."""


def parse_tool_calls(text: str) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    """A reply as its text without the calls, and the calls: (name, arguments)."""
    calls: list[tuple[str, dict[str, object]]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
        except (ValueError, RecursionError):
            return match[0]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return match[0]
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return match[0]
        calls.append((call["name"], arguments))
        return ""

    return _CALL.sub(take, text).strip() if "<tool_call>" in text else text, calls


def describe_tools(functions: Sequence[dict[str, object]]) -> str:
    """Descriptions of callable functions for a model.

    Args:
        functions: `name`, `description` and `parameters` (a JSON schema) of each.
    """
    return _DESCRIPTION.format(tools="\n".join(_dump_json(function) for function in functions))


def without_tools(
    messages: Sequence[Message], tools: Sequence[Tool], *, described_in: str = "system", results_as: str = "tool"
) -> list[Message]:
    """Return the same conversation for a chat template that cannot write tools: calls are text.

    Args:
        messages: the conversation, each content a text.
        tools: functions that are offered.
        described_in: role of the message that describes the tools, "system" or "user"; it is the first one of this role.
        results_as: role of a message with results. As "user", neighboring results and questions are one message, because such
            templates demand that user and assistant alternate.
    """
    plain = [_as_text(message) for message in messages]
    if results_as != "tool":
        plain = _merge_schemas([_as_user(message) for message in plain])
    if not tools:
        return plain
    described = describe_tools([tool.get("function", tool) for tool in tools])
    if plain and plain[0]["role"] == described_in:
        parts = [plain[0]["content"], described] if described_in == "system" else [described, plain[0]["content"]]
        return [{"role": described_in, "content": "\n\n".join(filter(None, parts))}, *plain[1:]]
    return [{"role": described_in, "content": described}, *plain]


def _as_user(message: Message) -> Message:
    """Return the result of a call as the user's words, in the form that goes with `<tool_call>`."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _merge_schemas(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {"role": "user", "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _as_text(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    parts = [message.get("content") or ""]
    for call in calls:
        function = call["function"]
        written = _dump_json({"name": function["name"], "arguments": arguments_of(function)})
        parts.append(f"<tool_call>{written}</tool_call>")
    return {"role": message["role"], "content": "\n".join(filter(None, parts))}


def arguments_of(function: dict[str, object]) -> object:
    """The arguments of a call: OpenAI's messages have them as a text of JSON, chat templates want the value."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _dump_json(value: object) -> str:
    """Write JSON as models do: letters that are not ASCII as they are."""
    return json.dumps(value, ensure_ascii=False)
