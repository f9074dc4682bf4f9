"""Text of a conversation as a model's chat template writes it, and the text that the template puts after a reply.

Templates differ in how they write a tool turn. The form that this one plays is found once, by writing a turn with marked texts: as
OpenAI's messages with calls and results, or, for a template that drops or refuses them, as text (`environments.tool_calls`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from rlrun.config.models.rollout import unread_argument
from rlrun.environments.message_content import ContentError, content_text
from rlrun.environments.protocol import Message, Tool
from rlrun.environments.tool_calls import arguments_of, without_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "@#reply#@"
"""Text of the model's reply where only what the template writes after it counts."""
_ARGUMENT, _RESULT, _QUESTION = "@#argument#@", "@#result#@", "@#question#@"
_CALL_ID = "call_"


class TemplateError(ValueError):
    """The chat template cannot be used for training."""


@dataclass(frozen=True)
class ToolForm:
    """A way to write a tool turn.

    Attributes:
        native: the template gets tools, calls and results as messages; otherwise calls become text.
        arguments_as_text: arguments of a call are JSON text (DeepSeek V3); otherwise the value.
        no_content: a reply that is calls alone has the content None (DeepSeek R1); otherwise an empty text.
        named_results: a result has the name of its function (Mistral v2).
        short_ids: ids of calls are nine letters and digits (Mistral v3); others are replaced by such ones.
        described_in: role of the first message, which describes the tools; None: the template describes them. Only if not native.
        results_as: role of a message with results; only if not native.
    """

    native: bool = True
    arguments_as_text: bool = False
    no_content: bool = False
    named_results: bool = False
    short_ids: bool = False
    described_in: str | None = "system"
    results_as: str = "tool"


_FORMS = (
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
"""In the order in which they are tried."""
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


def probe_call(argument: str = _ARGUMENT, *, calls: int = 1) -> Message:
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
    return {"role": "tool", "tool_call_id": f"{_CALL_ID}{number}", "content": _RESULT}


class ChatTemplate:
    """A chat template with its arguments.

    Args:
        tokenizer: a Hugging Face tokenizer with `chat_template`.
        arguments: further arguments of the template.

    Raises:
        TemplateError: there is no chat template, it has no such argument, or it drops a reply.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise TemplateError(
                "the tokenizer has no chat template; use a chat model or add chat_template to its tokenizer"
            )
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        if problem := unread_argument(self._arguments, template if isinstance(template, str) else json.dumps(template)):
            raise TemplateError(problem)
        self._proven: dict[object, _Way] = {}
        """Way to find what follows a reply, by the roles around it."""
        user: Message = {"role": "user", "content": "a"}
        reply: Message = {"role": "assistant", "content": STAND_IN}
        self.closing = _after(self.write([user, reply]), STAND_IN)
        """Text after a reply that ends the conversation."""

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """Form in which this template writes a whole tool turn; None: there is none."""
        return next((form for form in _FORMS if self._plays(form, [PROBE_TOOL])), None)

    @cached_property
    def call_form(self) -> ToolForm | None:
        """The same for calls in a conversation that offers no tools, as data for SFT may have them."""
        return next((form for form in _FORMS if self._plays(form, [])), None)

    def _form(self, tools: Sequence[Tool]) -> ToolForm | None:
        return self.tool_form if tools else self.call_form

    def write(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateError: the template refuses the conversation, or cannot write a tool turn.
        """
        messages = [_with_text(message) for message in messages]
        if not _has_tools(messages, tools):
            return self._render(messages, (), generation_prompt)
        if (form := self._form(tools)) is None:
            raise TemplateError("the chat template cannot write a tool turn: it drops or refuses the result of a call")
        return self._write_as(form, messages, tools, generation_prompt)

    def after_reply(
        self,
        messages: Sequence[Message],
        replies_at: int,
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text that the template writes after a reply: its closing, the new messages, the generation prompt.

        After calls, the closing may begin with the end of the calls' own form, where that is special tokens.

        Args:
            messages: the whole conversation.
            replies_at: index of the reply; the messages after it are new.
            tools: functions that the model may call.
            generation_prompt: whether the model is to answer.

        Raises:
            TemplateError: the template refuses the conversation, or leaves one of the new messages out.
        """
        reply, new = messages[replies_at], messages[replies_at + 1 :]
        shape = (len(reply.get("tool_calls") or ()), bool(tools), tuple(message.get("role") for message in new))
        way = self._proven.get(shape)
        if way is None:
            way = self._proven[shape] = self._prove(messages, replies_at, tools)
        return way(self, messages, replies_at, tools, generation_prompt)

    def play_turns(self) -> None:
        """Write a second question after a reply.

        Raises:
            TemplateError: the template cannot, so only environments of a single turn can be played.
        """
        user: Message = {"role": "user", "content": "a"}
        self.after_reply([user, {"role": "assistant", "content": "b"}, user], 1)

    def _prove(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool]) -> _Way:
        """Return the first way whose text holds each new message, in order."""
        new = messages[replies_at + 1 :]
        marks = [f"@#new{number}#@" for number in range(len(new))]
        marked = [
            *messages[: replies_at + 1],
            *(message | {"content": mark} for message, mark in zip(new, marks, strict=True)),
        ]
        reason = "it cannot be found what the chat template writes after a reply"
        for way in _WAYS if messages[replies_at].get("tool_calls") else _WAYS[-1:]:
            try:
                text = way(self, marked, replies_at, tools, True)
            except TemplateError as error:
                reason = str(error)
                continue
            lost = [message["role"] for message, mark in zip(new, marks, strict=True) if mark not in text]
            if not lost and sorted(marks, key=text.index) == marks:
                return way
            reason = f"the chat template leaves out a message of role {lost[0] if lost else 'unknown'}"
        raise TemplateError(reason)

    def _after_stand_in(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Put a stand-in for the reply and cut after it."""
        known = [*messages[:replies_at], {"role": "assistant", "content": STAND_IN}, *messages[replies_at + 1 :]]
        return _after(self.write(known, tools, generation_prompt=prompt), STAND_IN)

    def _after_calls(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Take what the new messages add to the conversation that ends with the calls."""
        return self._added(messages, replies_at, tools, prompt, lambda text: text)

    def _after_other_calls(
        self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool
    ) -> str:
        """Do the same from a marked argument on, for templates that write earlier messages differently later."""
        reply = messages[replies_at]
        *calls, last = reply["tool_calls"]
        function = last["function"] | {"arguments": json.dumps({"text": STAND_IN})}
        known = [*messages]
        known[replies_at] = {"role": "assistant", "content": "", "tool_calls": [*calls, last | {"function": function}]}
        return self._added(known, replies_at, tools, prompt, lambda text: _after(text, STAND_IN))

    def _added(
        self,
        messages: Sequence[Message],
        replies_at: int,
        tools: Sequence[Tool],
        prompt: bool,
        cut: Callable[[str], str],
    ) -> str:
        if (form := self._form(tools)) is None or not form.native:
            raise TemplateError("the chat template writes calls as text")
        head = cut(self.write(messages[: replies_at + 1], tools))
        whole = cut(self.write(messages, tools, generation_prompt=prompt))
        if not whole.startswith(head):
            raise TemplateError("the chat template writes a reply differently once the conversation continues")
        return self.closing_of(head) + whole[len(head) :]

    def closing_of(self, text: str) -> str:
        """Return the special tokens at the end of a text, with the blanks between and after them."""
        rest, closing = text, ""
        while token := next((token for token in self.special_tokens if rest.rstrip().endswith(token)), None):
            start = len(rest.rstrip()) - len(token)
            rest, closing = rest[:start], rest[start:] + closing
        return closing

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of all special tokens, the longest first.

        `all_special_tokens` has those with a name (eos, pad, ...) only: of Gemma's `<eos>` and `<end_of_turn>`, the first.
        """
        added = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(sorted({*added, *map(str, self._tokenizer.all_special_tokens)} - {""}, key=len, reverse=True))

    def _plays(self, form: ToolForm, tools: Sequence[Tool]) -> bool:
        """Whether a turn with a call, its result, a reply and a question is written whole and in order."""
        said: list[Message] = [
            {"role": "user", "content": "a"},
            probe_call(),
            probe_result(),
            {"role": "assistant", "content": STAND_IN},
            {"role": "user", "content": _QUESTION},
        ]
        try:
            text = self._write_as(form, said, tools, False)
            turn = self._write_as(form, said[:3], tools, True)
        except TemplateError:
            return False
        marks = [_ARGUMENT, _RESULT, STAND_IN, _QUESTION]
        places = [text.find(mark) for mark in marks]
        return (
            -1 not in places
            and places == sorted(places)
            and _RESULT in turn
            and text.count(PROBE_TOOL["function"]["name"]) > len(tools)  # it is offered, and it is called
        )

    def _write_as(
        self, form: ToolForm, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool
    ) -> str:
        if form.native:
            return self._render(natively(messages, form), tools, generation_prompt)
        if form.described_in is None:
            return self._render(without_tools(messages, (), results_as=form.results_as), tools, generation_prompt)
        plain = without_tools(messages, tools, described_in=form.described_in, results_as=form.results_as)
        return self._render(plain, (), generation_prompt)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._arguments,
            )
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error
        return str(text)


_Way = Callable[[ChatTemplate, Sequence[Message], int, Sequence[Tool], bool], str]
_WAYS: tuple[_Way, ...] = (
    ChatTemplate._after_calls,
    ChatTemplate._after_other_calls,
    ChatTemplate._after_stand_in,
)
"""The first ones keep the calls: some templates write results only after calls, and others end calls differently than texts."""


def _after(text: str, mark: str) -> str:
    _, found, after = text.rpartition(mark)
    if not found:
        raise TemplateError("the chat template drops an assistant message, so a conversation cannot be continued")
    return after


def _has_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def _with_text(message: Message) -> Message:
    """Return a message whose content is a text: templates of text models write a list of parts as Python shows it, or drop it."""
    try:
        text = content_text(message.get("content"), f"the content of a message of {message.get('role')}")
    except ContentError as error:
        raise TemplateError(str(error)) from error
    return message | {"content": text}


def natively(messages: Sequence[Message], form: ToolForm) -> list[Message]:
    """Return messages with calls and results as the template takes them."""
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
            known = message | {"content": content, "tool_calls": [_call(call, form) for call in calls]}
        written.append(known)
    return written


def _call(call: Mapping[str, Any], form: ToolForm) -> dict[str, Any]:
    arguments = arguments_of(call["function"])
    function = call["function"] | {"arguments": json.dumps(arguments) if form.arguments_as_text else arguments}
    return {**call, "function": function} | ({"id": short_id(call.get("id"))} if form.short_ids else {})


def short_id(id: object) -> str:
    """Return an id of nine letters and digits, the same one for the same id."""
    text = str(id or "")
    if re.fullmatch("[a-zA-Z0-9]{9}", text):
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]
