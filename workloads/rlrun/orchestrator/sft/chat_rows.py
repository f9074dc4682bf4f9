"""Validated conversation of a row: OpenAI messages with a loss weight each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlrun.config.models.data import DataConfig
from rlrun.environments.message_content import content_text, refuse_media, refuse_surrogates
from rlrun.environments.protocol import Message, Tool
from rlrun.orchestrator.rollouts.message_forms import THOUGHT_FIELDS

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """Conversation for a chat template."""

    messages: Sequence[Message]
    weights: Sequence[float]
    """Weight of each message's tokens in the loss; 0 for messages that are not learned."""
    tools: list[Tool] | None = None


def read_conversation(row: Mapping[str, object], config: DataConfig) -> Conversation:
    """Read the conversation of a row: its chat, or prompt and completion with only the completion learned.

    Raises:
        ValueError: a field is wrong; the error names the field and the problem.
    """
    refuse_media(row, "column")
    if row.get(config.messages_field) is not None:
        messages = _read_messages(row[config.messages_field], config.messages_field, "user")
        first = 0
    elif row.get(config.prompt_field) is not None or row.get(config.completion_field) is not None:
        for field in (config.prompt_field, config.completion_field):
            if row.get(field) is None:
                raise ValueError(f"{field} is missing; set both {config.prompt_field} and {config.completion_field}")
        messages = _read_messages(row[config.prompt_field], config.prompt_field, "user")
        first = len(messages)
        messages += _read_messages(row[config.completion_field], config.completion_field, "assistant")
    else:
        raise ValueError(
            f"the row has neither {config.messages_field} nor {config.prompt_field} and {config.completion_field} (columns: "
            f"{', '.join(sorted(row)) or 'none'}); set data.messagesField, promptField and completionField"
        )
    weights = []
    for index, message in enumerate(messages):
        weight = message.pop("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"message {index + 1}: weight is {weight!r}; it must be a number of 0 or more")
        weights.append(float(weight) if index >= first and message["role"] in config.loss_roles else 0.0)
    return Conversation(messages, weights, _read_tools(row.get(config.tools_field), config.tools_field))


def _read_messages(value: object, field: str, role: str) -> list[Message]:
    if isinstance(value, str):
        refuse_surrogates(value, field)
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field} is {_show_value(value)}; it must be a list of messages")
    return [_read_message(item, f"{field}[{index}]") for index, item in enumerate(value)]


def _read_message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_show_value(value)}; it must be a message with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    if message.get("role") not in ROLES:
        other = "; rename from to role and value to content" if {"from", "value"} <= set(message) else ""
        raise ValueError(
            f"{where}.role is {_show_value(message.get('role'))}; it must be one of {', '.join(ROLES)}{other}"
        )
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if message.get("content") is None and not calls:
        raise ValueError(f"{where}.content is None; it must be a text")
    refuse_media(message, f"field {where}")
    message["content"] = content_text(message.get("content"), f"{where}.content")
    refuse_surrogates(message["content"], f"{where}.content")
    for name in THOUGHT_FIELDS:
        if name in message:
            message[name] = content_text(message[name], f"{where}.{name}")
            refuse_surrogates(message[name], f"{where}.{name}")
    return message


def _tool_calls(calls: object, where: str) -> list[dict[str, object]]:
    """Return calls with the arguments as an object, as chat templates expect them. OpenAI writes them as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} is {_show_value(calls)}; it must be a list of calls")
    made = []
    for index, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{index}].function must have a name, got {_show_value(function)}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"{where}[{index}].function.arguments is not valid JSON: {error}") from None
        made.append(call | {"function": function | {"arguments": arguments}})
    return made


def _read_tools(value: object, field: str) -> list[Tool] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{field} is not valid JSON: {error}") from None
    if value is not None and (not isinstance(value, list) or not all(isinstance(item, dict) for item in value)):
        raise ValueError(f"{field} is {_show_value(value)}; it must be a list of tools")
    return value or None


def _show_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
