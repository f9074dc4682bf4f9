"""Conversion of messages to token ids and back, so that what the engine saw is what is trained on.

A conversation grows by appending: tokens that are there stay verbatim, only new messages are tokenised. What a chat template puts around
them is found by rendering the conversation with a stand-in for the model's own reply and taking what follows it.

Tools are described to the model by its chat template; for a template that knows none, as text in the system message.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from rlrun.config.models.rollout import unread_argument
from rlrun.environments.protocol import Message, Tool
from rlrun.environments.tool_calls import arguments_of, without_tools
from rlrun.orchestrator.rollouts.tokenizer import load_tokenizer
from rlrun.protocol.messages.packed import INTEGERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_IN = "@#reply#@"
_PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _STAND_IN}]
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_OPENINGS = 256
"""Prompts whose text and ids are remembered."""


class TemplateError(ValueError):
    """The chat template cannot be used for training."""


class ChatTokens:
    """A tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with `chat_template`.
        arguments: further arguments of the template.

    Raises:
        TemplateError: it has no chat template or no end-of-sequence token, or its template has none of such an argument.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template; use a chat model or add chat_template to its tokenizer"
            )
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token, so no reply would ever end")
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else json.dumps(template)
        if problem := unread_argument(self._arguments, text):
            raise TemplateError(problem)
        self._others: dict[str, ChatTokens] = {}
        """The same tokenizer with other arguments of its template."""
        self._openings: dict[str, Future[tuple[str, array[int]]]] = {}
        """The latest prompts, the one that was asked for last at the end."""
        self._lock = Lock()
        """Held for looks into `_openings`, never while something is rendered: the event loop takes it too."""
        self.vocabulary = len(tokenizer)
        """Tokens that the tokenizer knows."""
        self._special = set(tokenizer.all_special_ids)
        stops = {int(tokenizer.eos_token_id)}
        self._closing = self._after_reply(_PROBE, (), generation_prompt=False)
        closing = self._tokenise(self._closing)
        if closing and closing[0] in self._special:
            stops.add(closing[0])  # base models often end their template's turns with another token than their eos
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        """Tokens that end a reply; the model samples them, so they are trained on."""

    @classmethod
    def load(cls, source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTokens:
        """The tokenizer of a model folder or hub name."""
        return cls(load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code))

    def called_with(self, arguments: Mapping[str, object]) -> ChatTokens:
        """The same tokenizer, whose template gets these arguments; always the same object for the same ones.

        Raises:
            TemplateError: the template has no such argument, or cannot be used with it.
        """
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._others:
            self._others[key] = ChatTokens(self._tokenizer, arguments)
        return self._others[key]

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, array[int]]:
        """Text and ids of a conversation that the model is to answer, generation prompt included. Callable from any thread.

        Raises:
            TemplateError: the chat template refuses the conversation.
        """
        try:
            key = json.dumps([list(messages), list(tools)])
        except (TypeError, ValueError):
            return self._opening(messages, tools)
        # The rollouts of a group begin with the same words, at the same time; rendering them is half of a rollout's CPU.
        with self._lock:
            known = self._openings.pop(key, None)
            found = known or Future()
            self._openings[key] = found
            if len(self._openings) > _OPENINGS:
                del self._openings[next(iter(self._openings))]
        if known is None:
            try:
                found.set_result(self._opening(messages, tools))
            except BaseException as error:
                with self._lock:
                    self._openings.pop(key, None)
                found.set_exception(error)
        # Only threads wait here: prompts that the event loop renders itself are done when it returns.
        text, ids = found.result()
        return text, ids[:]

    def _opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, array[int]]:
        text = self.prompt(messages, tools)
        return text, self._tokenise(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Text of a conversation that the model is to answer.

        Raises:
            TemplateError: the chat template refuses the conversation.
        """
        return self._render(messages, tools, generation_prompt=True)

    def continuation(
        self, messages: Sequence[Message], replies_at: int, last_token: int, tools: Sequence[Tool] = ()
    ) -> array[int]:
        """Ids to append after the model's own tokens.

        Args:
            messages: the whole conversation, new messages included.
            replies_at: index of the model's latest reply; what follows it is new.
            last_token: the last token that the model sampled; a stop token is not repeated.
            tools: functions that the model may call.

        Raises:
            TemplateError: the chat template refuses the conversation, or what follows the reply cannot be found.
        """
        known = [*messages[:replies_at], {"role": "assistant", "content": _STAND_IN}, *messages[replies_at + 1 :]]
        try:
            added = self._after_reply(known, tools, generation_prompt=True)
        except TemplateError:
            # It wants the calls that are answered: then what follows the whole reply, as the template writes that.
            whole = self.prompt(messages, tools)
            head = self._render(messages[: replies_at + 1], tools, generation_prompt=False)
            if not whole.startswith(head):
                raise
            added = self._closing + whole[len(head) :]
        return self.appended(added, last_token)

    def appended(self, text: str, last_token: int | None = None) -> array[int]:
        """Ids of a text that follows the model's own tokens, if any; a stop token that it sampled is not repeated."""
        added = self._tokenise(text)
        if added and added[0] == last_token and last_token in self.stop_token_ids:
            return added[1:]
        return added

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without stop and other special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def spelled(self, token_ids: Sequence[int]) -> str:
        """All of a reply as the chat template would have to write it: with special tokens, without the one that ends it."""
        ids = self.unended(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def unended(self, token_ids: Sequence[int]) -> list[int]:
        """A reply without the token that ended it."""
        return list(token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids)

    @cached_property
    def _knows_tools(self) -> bool:
        """True if the chat template writes tools into the prompt."""
        user = _PROBE[:1]
        return self._written(user, [_PROBE_TOOL], generation_prompt=True) != self._written(
            user, [], generation_prompt=True
        )

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        if (tools or any(message.get("tool_calls") for message in messages)) and not self._knows_tools:
            messages, tools = without_tools(messages, tools), ()
        return self._written([_plain(message) for message in messages], tools, generation_prompt=generation_prompt)

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
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

    def _after_reply(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        _, found, after = self._render(messages, tools, generation_prompt=generation_prompt).rpartition(_STAND_IN)
        if not found:
            raise TemplateError("the chat template drops an assistant message, so a conversation cannot be continued")
        return after

    def _tokenise(self, text: str) -> array[int]:
        # Without columns that nobody reads: building them holds the interpreter's lock, the tokenizer itself does not.
        only = {"return_attention_mask": False, "return_token_type_ids": False}
        return array(INTEGERS, self._tokenizer(text, add_special_tokens=False, **only).input_ids)


def _plain(message: Message) -> Message:
    """A message as chat templates take it: its content a text, the arguments of its calls values."""
    plain = message if message.get("content") is not None else message | {"content": ""}
    if calls := plain.get("tool_calls"):
        functions = [call["function"] | {"arguments": arguments_of(call["function"])} for call in calls]
        return plain | {
            "tool_calls": [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
        }
    return plain
