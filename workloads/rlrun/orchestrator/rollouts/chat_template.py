"""Text of a conversation in a model's chat template, and the text that the template writes after a reply.

Templates differ in how they write a tool turn. The form is detected once per template by rendering a turn with marked
texts: OpenAI messages with calls and results, or plain text (`environments.tool_calls`) for a template that drops or
refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from rlrun.config.models.rollout import unread_argument
from rlrun.environments.message_content import ContentError, content_text
from rlrun.environments.protocol import Message, Tool
from rlrun.environments.tool_calls import without_tools
from rlrun.orchestrator.rollouts.message_forms import (
    PROBE_ARGUMENT,
    PROBE_RESULT,
    PROBE_TOOL,
    THOUGHT_FIELDS,
    TOOL_FORMS,
    ToolForm,
    native_form,
    probe_call,
    probe_result,
    thought_of,
    with_thought,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "@#reply#@"
"""Placeholder for the model's reply, used if only the text after it matters."""
_QUESTION, _THOUGHT = "@#question#@", "@#thought#@"


class TemplateError(ValueError):
    """The chat template is unusable for training."""


class ChatTemplate:
    """A chat template with its arguments.

    Args:
        tokenizer: Hugging Face tokenizer with `chat_template`.
        arguments: additional arguments of the template.

    Raises:
        TemplateError: the tokenizer has no chat template, or the template does not use an argument or drops a reply.
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
        """Verified way to find the text after a reply, by the roles around it."""
        self._several: dict[tuple[ToolForm, bool], bool] = {}
        self._complete: set[object] = set()
        """Shapes of conversations (roles, calls, tools) that are rendered completely."""
        user: Message = {"role": "user", "content": "a"}
        reply: Message = {"role": "assistant", "content": STAND_IN}
        self.closing = _text_after(self.write([user, reply]), STAND_IN)
        """Text after a reply at the end of a conversation."""

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """Form in which this template renders a complete tool turn, or None."""
        return next((form for form in TOOL_FORMS if self._renders_turn(form, [PROBE_TOOL])), None)

    @cached_property
    def call_form(self) -> ToolForm | None:
        """Form for calls in a conversation without offered tools, as in SFT data, or None."""
        return next((form for form in TOOL_FORMS if self._renders_turn(form, [])), None)

    def _tool_form_for(self, tools: Sequence[Tool]) -> ToolForm | None:
        return self.tool_form if tools else self.call_form

    def write(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateError: the template refuses the conversation or cannot render a tool turn.
        """
        messages = [self._with_text(message) for message in messages]
        if not _has_tools(messages, tools):
            return self._apply_template(messages, (), generation_prompt)
        if (form := self._tool_form_for(tools)) is None:
            raise TemplateError("the chat template cannot render a tool turn: it drops or refuses the result of a call")
        if any(len(message.get("tool_calls") or ()) > 1 for message in messages) and not self._writes_calls(
            form, tools
        ):
            raise TemplateError(
                "the chat template renders only one call per reply; put each call into a separate reply, or keep only the first "
                "call of the reply and its result"
            )
        return self._write_as(form, messages, tools, generation_prompt)

    def refuse_lost_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Refuse a conversation with a message that the template drops, such as a message with an unknown role.

        The content of a reply with calls is not checked.

        Raises:
            TemplateError: a message is dropped; the error names it and a fix.
        """
        shape = tuple((m.get("role"), bool(m.get("tool_calls"))) for m in messages), bool(tools)
        if shape in self._complete:
            return
        numbers = [number for number, message in enumerate(messages, 1) if not message.get("tool_calls")]
        marked = [
            _with_mark(message, f"@#new{number}#@") if number in numbers else message
            for number, message in enumerate(messages, 1)
        ]
        text = self.write(marked, tools, generation_prompt=True)
        if (lost := next((n for n in numbers if f"@#new{n}#@" not in text), None)) is not None:
            role = messages[lost - 1].get("role")
            fixes = {"developer": "change its role to system", "system": "move its text to the first user message"}
            fix = fixes.get(str(role), "remove the message, or use a chat template that renders it")
            raise TemplateError(f"the chat template drops message {lost} with role {role}; {fix}")
        self._complete.add(shape)

    def after_reply(
        self,
        messages: Sequence[Message],
        replies_at: int,
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text that the template writes after a reply: closing, new messages and generation prompt.

        After calls, the closing may start with the special tokens that end the calls.

        Args:
            messages: complete conversation.
            replies_at: index of the reply; the later messages are new.
            tools: functions that the model may call.
            generation_prompt: whether the model must answer next.

        Raises:
            TemplateError: the template refuses the conversation or drops one of the new messages.
        """
        reply, new = messages[replies_at], messages[replies_at + 1 :]
        shape = (len(reply.get("tool_calls") or ()), bool(tools), tuple(message.get("role") for message in new))
        way = self._proven.get(shape)
        if way is None:
            way = self._proven[shape] = self._find_way(messages, replies_at, tools)
        return way(self, messages, replies_at, tools, generation_prompt)

    def play_turns(self) -> None:
        """Render a second question after a reply.

        Raises:
            TemplateError: the template cannot do it, so only single-turn environments are supported.
        """
        user: Message = {"role": "user", "content": "a"}
        self.after_reply([user, {"role": "assistant", "content": "b"}, user], 1)

    def _find_way(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool]) -> _Way:
        """Return the first way whose text contains each new message, in order."""
        new = messages[replies_at + 1 :]
        marks = [f"@#new{number}#@" for number in range(len(new))]
        marked = [*messages[: replies_at + 1], *map(_with_mark, new, marks)]
        reasons: list[str] = []
        for way in _WAYS if messages[replies_at].get("tool_calls") else _WAYS[-1:]:
            try:
                text = way(self, marked, replies_at, tools, True)
            except TemplateError as error:
                reasons.append(str(error))
                continue
            lost = [message["role"] for message, mark in zip(new, marks, strict=True) if mark not in text]
            if not lost and sorted(marks, key=text.index) == marks:
                return way
            reasons.append(f"the chat template drops a message with role {lost[0] if lost else 'unknown'}")
        # After several calls the first reason names the cause; the last way omits the calls.
        raise TemplateError(reasons[0 if len(messages[replies_at].get("tool_calls") or ()) > 1 else -1])

    def _after_stand_in(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Replace the reply by a placeholder and cut the text after it."""
        known = [*messages[:replies_at], {"role": "assistant", "content": STAND_IN}, *messages[replies_at + 1 :]]
        return _text_after(self.write(known, tools, generation_prompt=prompt), STAND_IN)

    def _after_calls(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Return the text that the new messages add to the conversation up to the calls."""
        return self._added_text(messages, replies_at, tools, prompt, lambda text: text)

    def _after_other_calls(
        self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool
    ) -> str:
        """Return the added text after a marked argument, for templates that render earlier messages differently later."""
        known = [*messages]
        known[replies_at] = _with_mark(
            {"role": "assistant", "content": "", "tool_calls": messages[replies_at]["tool_calls"]}, STAND_IN
        )
        return self._added_text(known, replies_at, tools, prompt, lambda text: _text_after(text, STAND_IN))

    def _added_text(
        self,
        messages: Sequence[Message],
        replies_at: int,
        tools: Sequence[Tool],
        prompt: bool,
        cut: Callable[[str], str],
    ) -> str:
        if (form := self._tool_form_for(tools)) is None or not form.native:
            raise TemplateError("the chat template renders calls as text")
        head = cut(self.write(messages[: replies_at + 1], tools))
        whole = cut(self.write(messages, tools, generation_prompt=prompt))
        if not whole.startswith(head):
            raise TemplateError("the chat template renders a reply differently after the conversation continues")
        return self.closing_of(head) + whole[len(head) :]

    def closing_of(self, text: str) -> str:
        """Return the special tokens at the end of a text, with the whitespace between and after them."""
        rest, closing = text, ""
        while token := next((token for token in self.special_tokens if rest.rstrip().endswith(token)), None):
            start = len(rest.rstrip()) - len(token)
            rest, closing = rest[:start], rest[start:] + closing
        return closing

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of all special tokens, the longest first.

        `all_special_tokens` contains only tokens with a name (eos, pad, ...): Gemma's `<eos>`, but not its
        `<end_of_turn>`.
        """
        added = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(sorted({*added, *map(str, self._tokenizer.all_special_tokens)} - {""}, key=len, reverse=True))

    @cached_property
    def thought_field(self) -> str | None:
        """Field in which the template reads the thoughts of the last reply; None if it renders no thoughts, such as
        DeepSeek R1's.
        """
        user: Message = {"role": "user", "content": "a"}
        form = self.tool_form if self.tool_form is not None and self.tool_form.native else None
        for name in THOUGHT_FIELDS:
            reply: Message = {"role": "assistant", "content": STAND_IN, name: _THOUGHT}
            with suppress(TemplateError):
                if _THOUGHT in self._apply_template([user, reply], (), False):
                    return name
            with suppress(TemplateError):  # Gemma 4 renders thoughts only before calls
                call = probe_call() | {name: _THOUGHT}
                if form and _THOUGHT in self._write_as(form, [user, call], [PROBE_TOOL], False):
                    return name
        return None

    def _with_text(self, message: Message) -> Message:
        """Return a message with text as content and thoughts, because text models' templates render a list of parts as
        its Python representation.
        """
        try:
            text = content_text(message.get("content"), f"the content of a message of {message.get('role')}")
            if message.get("role") != "assistant" or not thought_of(message) or (field := self.thought_field) is None:
                return message | {"content": text}
            known = with_thought(message | {"content": text}, field)
        except ContentError as error:
            raise TemplateError(str(error)) from error
        if text and known.get("tool_calls") and self._refuses_thought_and_content:
            return known | {"content": "", field: f"{known[field]}\n{text}"}
        return known

    @cached_property
    def _refuses_thought_and_content(self) -> bool:
        """Whether a reply with calls may have only thoughts or only content (GPT-OSS, which writes both in the same
        channel).
        """
        if (form := self.tool_form) is None or not form.native or self.thought_field is None:
            return False
        both = probe_call() | {"content": STAND_IN, self.thought_field: _THOUGHT}
        try:
            self._write_as(form, [{"role": "user", "content": "a"}, both], [PROBE_TOOL], False)
        except TemplateError:
            return True
        return False

    def _writes_calls(self, form: ToolForm, tools: Sequence[Tool]) -> bool:
        """Return whether each of two calls in one reply is rendered. True if the template also refuses a single call
        there.
        """
        if (known := self._several.get(key := (form, bool(tools)))) is None:
            first, second = probe_call(_QUESTION)["tool_calls"][0], probe_call(calls=2)["tool_calls"][1]
            both: Message = {"role": "assistant", "content": "", "tool_calls": [first, second]}
            known = True
            with suppress(TemplateError):
                self._write_as(
                    form, [{"role": "user", "content": "a"}, probe_call()], [PROBE_TOOL] * bool(tools), False
                )
                known = False
                text = self._write_as(form, [{"role": "user", "content": "a"}, both], [PROBE_TOOL] * bool(tools), False)
                known = _QUESTION in text and PROBE_ARGUMENT in text
            self._several[key] = known
        return known

    def _renders_turn(self, form: ToolForm, tools: Sequence[Tool]) -> bool:
        """Return whether a turn with a call, its result, a reply and a question is rendered completely and in order."""
        turn_messages: list[Message] = [
            {"role": "user", "content": "a"},
            probe_call(),
            probe_result(),
            {"role": "assistant", "content": STAND_IN},
            {"role": "user", "content": _QUESTION},
        ]
        try:
            text = self._write_as(form, turn_messages, tools, False)
            turn = self._write_as(form, turn_messages[:3], tools, True)
        except TemplateError:
            return False
        marks = [PROBE_ARGUMENT, PROBE_RESULT, STAND_IN, _QUESTION]
        places = [text.find(mark) for mark in marks]
        return (
            -1 not in places
            and places == sorted(places)
            and PROBE_RESULT in turn
            and text.count(PROBE_TOOL["function"]["name"])
            > len(tools)  # one occurrence in the offer and one in the call
        )

    def _write_as(
        self, form: ToolForm, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool
    ) -> str:
        if form.native:
            return self._apply_template(native_form(messages, form), tools, generation_prompt)
        if form.described_in is None:
            return self._apply_template(
                without_tools(messages, (), results_as=form.results_as), tools, generation_prompt
            )
        plain = without_tools(messages, tools, described_in=form.described_in, results_as=form.results_as)
        return self._apply_template(plain, (), generation_prompt)

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool) -> str:
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
        return _without_surrogates(str(text))


_Way = Callable[[ChatTemplate, Sequence[Message], int, Sequence[Tool], bool], str]
_WAYS: tuple[_Way, ...] = (
    ChatTemplate._after_calls,
    ChatTemplate._after_other_calls,
    ChatTemplate._after_stand_in,
)
"""Ways in order of preference. The first two keep the calls: some templates render results only after calls, and others
end calls differently than texts.
"""


def _with_mark(message: Message, mark: str) -> Message:
    """Return a message with a mark as its text, or in its last call, because templates drop the content next to calls."""
    if not (calls := message.get("tool_calls")):
        return message | {"content": mark}
    *others, last = calls
    function = last["function"] | {"arguments": json.dumps({"text": mark})}
    return message | {"tool_calls": [*others, last | {"function": function}]}


def _without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which tokenizers reject. A model can write them in the JSON of a call."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text_after(text: str, mark: str) -> str:
    _, found, after = text.rpartition(mark)
    if not found:
        raise TemplateError("the chat template drops an assistant message, so a conversation cannot be continued")
    return after


def _has_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
