"""Requests and answers of OpenAI's chat completions API as values, without I/O.

The run's configuration controls sampling: `temperature`, `top_p`, `seed`, penalties and similar fields are accepted and ignored.
Fields that would change the form of the answer in an unsupported way are rejected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlrun.environments.message_content import ContentError, content_text
from rlrun.environments.protocol import Message, Reply, Tool

MODEL = "policy"
"""Name of the model. Requests may use any other name."""
_MODEL_CHARACTERS = 200
"""Longest part of a request's model name that the answer repeats, in characters."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RequestError(Exception):
    """Error that is returned as the answer to a request.

    Args:
        message: reason and fix.
        param: name of the field, if the error is about one.
        code: error code of OpenAI's API.
        status: status of the HTTP answer.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def document(self) -> dict[str, object]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A validated request."""

    messages: list[Message]
    tools: list[Tool]
    max_tokens: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    model: str


def read_request(body: object) -> Asked:
    """Validate the body of a request.

    Raises:
        RequestError: the body is malformed, or requests an unsupported feature.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _refuse_request(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
        raise RequestError("stop must be a text or a list of texts", "stop")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    return Asked(
        messages=[_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=[] if body.get("tool_choice") == "none" else _read_tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        stop=stop,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        model=str(body.get("model") or MODEL)[:_MODEL_CHARACTERS],
    )


def _refuse_request(body: Mapping[str, object]) -> None:
    response_format = body.get("response_format") or {"type": "text"}
    wanted = {
        "n": (body.get("n") in (None, 1), "one choice is sampled; send another request for another choice"),
        "tool_choice": (body.get("tool_choice") in (None, "auto", "none"), "the policy chooses; use auto or none"),
        "response_format": (
            isinstance(response_format, dict) and response_format.get("type") == "text",
            "the policy's tokens are not constrained; describe the format in the prompt",
        ),
        "logprobs": (not body.get("logprobs"), "log-probabilities are recorded, not returned; remove it"),
        "logit_bias": (not body.get("logit_bias"), "the policy's tokens are not constrained; remove it"),
        "chat_template_kwargs": (
            not body.get("chat_template_kwargs"),
            "the run's sampling.chatTemplateArguments apply to all requests; set them there",
        ),
        "functions": (not body.get("functions"), "use tools"),
        "continue_final_message": (
            not body.get("continue_final_message"),
            "a partial reply cannot be continued; let messages end with another role than assistant",
        ),
        "add_generation_prompt": (
            body.get("add_generation_prompt") in (None, True),
            "the policy samples a new message; remove it",
        ),
        "modalities": (body.get("modalities") in (None, ["text"]), "only text is supported; remove it"),
    }
    for name, (served, fix) in wanted.items():
        if not served:
            raise RequestError(f"{name} ({body[name]!r}) is not supported: {fix}", name, "unsupported_parameter")


def _max_tokens(body: Mapping[str, object]) -> int | None:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise RequestError(f"{name} ({value!r}) must be a positive number", name)
    return value


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or (role := _ROLES.get(str(message.get("role")))) is None:
        raise RequestError(f"{where} must be an object whose role is one of {', '.join(_ROLES)}", where)
    read: Message = {"role": role, "content": _read_text(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be calls of functions", where)
        read["tool_calls"] = [_read_call(call, where) for call in calls]
    return read | {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}


def _read_text(content: object, where: str) -> str:
    try:
        return content_text(content, f"{where}.content")
    except ContentError as error:
        raise RequestError(str(error), where) from None


def _read_call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.tool_calls must be calls of functions", where)
    written = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
    return {"id": call.get("id"), "type": "function", "function": written}


def _read_tools(tools: object) -> list[Tool]:
    offered = tools or []
    if not isinstance(offered, list):
        raise RequestError("tools must be a list", "tools")
    for tool in offered:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("tools must be functions with a name", "tools")
    return list(offered)


# ---- answers


def make_completion(asked: Asked, reply: Reply, number: int) -> dict[str, object]:
    """Return the answer to a request as a JSON object. `number` is the number of the reply in its episode."""
    return {
        **_answer_head(asked, number, "chat.completion"),
        "choices": [
            {"index": 0, "message": _answer_choice(reply), "finish_reason": _finish_reason(reply), "logprobs": None},
        ],
        "usage": _token_usage(reply),
    }


def make_chunks(asked: Asked, reply: Reply, number: int) -> Iterator[str]:
    """Yield the answer as events of a stream. The reply is complete before the first event: sampling is not streamed."""
    head = _answer_head(asked, number, "chat.completion.chunk")
    message = _answer_choice(reply)
    calls = [call | {"index": index} for index, call in enumerate(message.pop("tool_calls", []))]
    delta = message | ({"tool_calls": calls} if calls else {})
    for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": _finish_reason(reply)}):
        yield _stream_event({**head, "choices": [{"index": 0, "logprobs": None, **choice}]})
    if asked.include_usage:
        yield _stream_event({**head, "choices": [], "usage": _token_usage(reply)})
    yield "data: [DONE]\n\n"


def _answer_head(asked: Asked, number: int, kind: str) -> dict[str, object]:
    return {"id": f"reply-{number}", "object": kind, "created": int(time.time()), "model": asked.model}


def _answer_choice(reply: Reply) -> Message:
    message = reply.message
    return message | {"content": message["content"] or None} if reply.tool_calls else message


def _finish_reason(reply: Reply) -> str:
    if reply.truncated:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def _token_usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _stream_event(document: dict[str, object]) -> str:
    return f"data: {json.dumps(document)}\n\n"
