"""Text of a conversation as a model's chat template writes it, and the text that the template puts after a reply.

Templates differ in how they write a tool turn. The form that this one plays is found once, by writing a turn with marked texts: as
OpenAI's messages with calls and results, or, for a template that drops or refuses them, as text (`environments.tool_calls`).
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
"""Text of the model's reply where only what the template writes after it counts."""
_QUESTION, _THOUGHT = "@#question#@", "@#thought#@"


class TemplateError(ValueError):
    """The chat template cannot be used for training."""


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
        self._several: dict[tuple[ToolForm, bool], bool] = {}
        self._complete: set[object] = set()
        """Shapes of conversations (roles, calls, tools) of which each message is written."""
        user: Message = {"role": "user", "content": "a"}
        reply: Message = {"role": "assistant", "content": STAND_IN}
        self.closing = _text_after(self.write([user, reply]), STAND_IN)
        """Text after a reply that ends the conversation."""

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """Form in which this template writes a whole tool turn; None: there is none."""
        return next((form for form in TOOL_FORMS if self._plays(form, [PROBE_TOOL])), None)

    @cached_property
    def call_form(self) -> ToolForm | None:
        """The same for calls in a conversation that offers no tools, as data for SFT may have them."""
        return next((form for form in TOOL_FORMS if self._plays(form, [])), None)

    def _form(self, tools: Sequence[Tool]) -> ToolForm | None:
        return self.tool_form if tools else self.call_form

    def write(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateError: the template refuses the conversation, or cannot write a tool turn.
        """
        messages = [self._with_text(message) for message in messages]
        if not _has_tools(messages, tools):
            return self._render(messages, (), generation_prompt)
        if (form := self._form(tools)) is None:
            raise TemplateError("the chat template cannot write a tool turn: it drops or refuses the result of a call")
        if any(len(message.get("tool_calls") or ()) > 1 for message in messages) and not self._writes_calls(
            form, tools
        ):
            raise TemplateError(
                "the chat template writes only one call of a reply; put each call into a reply of its own, or keep the first call of the "
                "reply and leave out the others and their results"
            )
        return self._write_as(form, messages, tools, generation_prompt)

    def refuse_lost_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Refuse a conversation of which the template leaves out a message, such as one of a role that it does not know.

        The content of a reply with calls is not checked.

        Raises:
            TemplateError: names the message, and the fix.
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
            fixes = {"developer": "give it the role system", "system": "put its text into the first user message"}
            fix = fixes.get(str(role), "remove it, or give the model a chat template that writes it")
            raise TemplateError(f"the chat template leaves out message {lost}, of role {role}; {fix}")
        self._complete.add(shape)

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
            reasons.append(f"the chat template leaves out a message of role {lost[0] if lost else 'unknown'}")
        # After several calls the first way says that there are several; the last one leaves the calls out.
        raise TemplateError(reasons[0 if len(messages[replies_at].get("tool_calls") or ()) > 1 else -1])

    def _after_stand_in(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Put a stand-in for the reply and cut after it."""
        known = [*messages[:replies_at], {"role": "assistant", "content": STAND_IN}, *messages[replies_at + 1 :]]
        return _text_after(self.write(known, tools, generation_prompt=prompt), STAND_IN)

    def _after_calls(self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool) -> str:
        """Take what the new messages add to the conversation that ends with the calls."""
        return self._added(messages, replies_at, tools, prompt, lambda text: text)

    def _after_other_calls(
        self, messages: Sequence[Message], replies_at: int, tools: Sequence[Tool], prompt: bool
    ) -> str:
        """Do the same from a marked argument on, for templates that write earlier messages differently later."""
        known = [*messages]
        known[replies_at] = _with_mark(
            {"role": "assistant", "content": "", "tool_calls": messages[replies_at]["tool_calls"]}, STAND_IN
        )
        return self._added(known, replies_at, tools, prompt, lambda text: _text_after(text, STAND_IN))

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

    @cached_property
    def thought_field(self) -> str | None:
        """Field in which the template reads the thoughts of the last reply; None: it writes none, as DeepSeek R1's."""
        user: Message = {"role": "user", "content": "a"}
        form = self.tool_form if self.tool_form is not None and self.tool_form.native else None
        for name in THOUGHT_FIELDS:
            reply: Message = {"role": "assistant", "content": STAND_IN, name: _THOUGHT}
            with suppress(TemplateError):
                if _THOUGHT in self._render([user, reply], (), False):
                    return name
            with suppress(TemplateError):  # Gemma 4 writes them before calls only
                call = probe_call() | {name: _THOUGHT}
                if form and _THOUGHT in self._write_as(form, [user, call], [PROBE_TOOL], False):
                    return name
        return None

    def _with_text(self, message: Message) -> Message:
        """Return a message with texts as content and thoughts: templates of text models write a list of parts as Python shows it."""
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
        """Whether a reply with calls has thoughts or a content (GPT-OSS, which writes both in the same channel)."""
        if (form := self.tool_form) is None or not form.native or self.thought_field is None:
            return False
        both = probe_call() | {"content": STAND_IN, self.thought_field: _THOUGHT}
        try:
            self._write_as(form, [{"role": "user", "content": "a"}, both], [PROBE_TOOL], False)
        except TemplateError:
            return True
        return False

    def _writes_calls(self, form: ToolForm, tools: Sequence[Tool]) -> bool:
        """Whether each of two calls in one reply is written. True if the template refuses one call in this place as well."""
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
        marks = [PROBE_ARGUMENT, PROBE_RESULT, STAND_IN, _QUESTION]
        places = [text.find(mark) for mark in marks]
        return (
            -1 not in places
            and places == sorted(places)
            and PROBE_RESULT in turn
            and text.count(PROBE_TOOL["function"]["name"]) > len(tools)  # it is offered, and it is called
        )

    def _write_as(
        self, form: ToolForm, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool
    ) -> str:
        if form.native:
            return self._render(native_form(messages, form), tools, generation_prompt)
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
        return _without_surrogates(str(text))


_Way = Callable[[ChatTemplate, Sequence[Message], int, Sequence[Tool], bool], str]
_WAYS: tuple[_Way, ...] = (
    ChatTemplate._after_calls,
    ChatTemplate._after_other_calls,
    ChatTemplate._after_stand_in,
)
"""The first ones keep the calls: some templates write results only after calls, and others end calls differently than texts."""


def _with_mark(message: Message, mark: str) -> Message:
    """Return a message with a mark as its text; in its last call if there is one, because templates leave out contents beside calls."""
    if not (calls := message.get("tool_calls")):
        return message | {"content": mark}
    *others, last = calls
    function = last["function"] | {"arguments": json.dumps({"text": mark})}
    return message | {"tool_calls": [*others, last | {"function": function}]}


def _without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which no tokenizer takes: a model can write them in the JSON of a call."""
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
