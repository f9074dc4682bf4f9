"""Tool calls as text, for models whose engine or chat template has no format for them:

    <tool_call>{"name": "...", "arguments": {...}}</tool_call>

Many models are trained on this format (Hermes, Qwen). A call with invalid JSON stays in the text.
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
    """Split a reply into its text without the calls, and the calls as (name, arguments)."""
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
    """Return a text that describes callable functions for a model.

    Args:
        functions: functions with `name`, `description` and `parameters` (a JSON schema).
    """
    return _DESCRIPTION.format(tools="\n".join(_dump_json(function) for function in functions))


def without_tools(
    messages: Sequence[Message], tools: Sequence[Tool], *, described_in: str = "system", results_as: str = "tool"
) -> list[Message]:
    """Return the same conversation with tools and calls as text, for a chat template that does not support tools.

    Args:
        messages: conversation, in which each content is a text.
        tools: offered functions.
        described_in: role of the message that describes the tools, "system" or "user"; the first message of the result has this role.
        results_as: role of messages with results of calls. With "user", adjacent user messages are merged, because templates without
            tools require that user and assistant alternate.
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
    """Return a tool's result as a user message, in the format that belongs to `<tool_call>`."""
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
    """Return the arguments of a call as a value. OpenAI's messages contain them as JSON text, but chat templates need the value."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _dump_json(value: object) -> str:
    """Return JSON as models write it: with non-ASCII letters unescaped."""
    return json.dumps(value, ensure_ascii=False)
