"""Tokenizer of the run, and the conversion of messages to token ids and back.

The tokenizer is loaded without torch if possible. Training uses exactly the tokens that the engine saw.

A conversation grows only at the end: existing tokens stay unchanged, and only the text that the chat template writes
after a reply is tokenized (`chat_template`). A reply ends with a sampled token, and the template also writes an end
of the turn. The sampled token stays, and the template's token is removed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from rlrun.environments.protocol import Message, Tool
from rlrun.orchestrator.rollouts.chat_template import ChatTemplate, TemplateError
from rlrun.orchestrator.rollouts.message_forms import PROBE_TOOL, probe_call, probe_result
from rlrun.protocol.messages.packed_columns import INTEGERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_GENERIC = "TokenizersBackend"
"""Class name that transformers writes for a tokenizer that consists only of its `tokenizer.json`."""
_TEXT_CONFIGS = ("text_config", "llm_config", "thinker_config")
"""Keys under which multimodal models keep the configuration of their language model."""
_MODEL_TYPE = "llama"
"""Only model type that is loaded without AutoTokenizer. For other types AutoTokenizer corrects files that name the
wrong class.
"""


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name, with the same result as `AutoTokenizer`.

    AutoTokenizer imports torch, which costs seconds of CPU time and 600 MB. A folder that names the generic class (tiny
    models do) is therefore loaded directly.

    Raises:
        OSError, ValueError: the tokenizer is missing or unreadable.
    """
    if _is_generic(Path(source)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(source))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(source), revision=revision or "main", trust_remote_code=trust_remote_code)


def stored_ends(source: str | Path, *, revision: str | None = None) -> tuple[int, ...]:
    """Return the ids of `eos_token_id` in the model's `generation_config.json`, at which the engine stops; empty
    without the file.

    Raises:
        OSError, ValueError: the file is unreadable or the value is not an id or a list of ids.
    """
    from transformers.utils.hub import cached_file

    file = cached_file(
        str(source),
        "generation_config.json",
        revision=revision or "main",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if file is None:
        return ()
    ends = json.loads(Path(file).read_bytes()).get("eos_token_id")
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(id) is int for id in found):
        raise ValueError(f"{file}: eos_token_id is {ends!r}; expected a number or a list of numbers")
    return tuple(found)


def preload_modules() -> None:
    """Import the modules of `load_tokenizer`, which takes a second, while the trainer starts.

    Must not run in parallel with another thread that imports transformers, which fills its namespace during the import.
    """
    with suppress(ImportError):  # `load_tokenizer` reports it
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def read_vocabulary_size(source: str | Path, *, revision: str | None = None) -> int | None:
    """Return `vocab_size` of a model folder or hub name, or None if its `config.json` is unreadable or has no such
    value.

    It is often larger than the tokenizer: models pad their embedding and also sample ids of the padding.
    """
    file = Path(source) / "config.json"
    try:
        if not Path(source).is_dir():
            from transformers.utils import cached_file

            file = Path(cached_file(str(source), "config.json", revision=revision or "main"))
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    texts = [document, *(document.get(name) for name in _TEXT_CONFIGS)] if isinstance(document, dict) else []
    sizes = [text.get("vocab_size") for text in texts if isinstance(text, dict)]
    # The largest: a multimodal model may have several values, and no valid id may be refused.
    return max((size for size in sizes if type(size) is int and size > 0), default=None)


def _is_generic(folder: Path) -> bool:
    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        model = json.loads((folder / "config.json").read_bytes())
        return (tokenizer.get("tokenizer_class"), model.get("model_type")) == (
            _GENERIC,
            _MODEL_TYPE,
        ) and "auto_map" not in tokenizer
    except (OSError, ValueError, AttributeError):
        return False


PREFILLED = "the last message has the role assistant, and prefilled replies are unsupported; end the conversation with another role"
_OPENINGS = 256
"""Limit of cached prompts with their text and ids."""
SAMPLED_ENDS = 9
"""Limit of tokens at the end of a reply that the template may repeat: the end of the calls and of the turn."""


class ChatTokens:
    """A tokenizer and its chat template.

    Args:
        tokenizer: Hugging Face tokenizer with `chat_template`.
        arguments: additional arguments of the template.
        ends: tokens that end a reply by the model's `generation_config.json`; the engine also stops at them.

    Raises:
        TemplateError: the tokenizer has no chat template or no end-of-sequence token, or its template does not use
            an argument.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, object] | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.template = ChatTemplate(tokenizer, arguments)
        """Chat template with the arguments."""
        if tokenizer.eos_token_id is None:
            raise TemplateError(
                "the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )
        self._tokenizer, self._ends = tokenizer, tuple(ends)
        self._others: dict[str, ChatTokens] = {}
        """The same tokenizer with other arguments of its template."""
        self._openings: dict[str, Future[tuple[str, array[int]]]] = {}
        """Cached prompts, the most recently used last."""
        self._lock = Lock()
        """Lock of `_openings`, never held during rendering, because the event loop takes it too."""
        self.vocabulary = len(tokenizer)
        """Number of tokens of the tokenizer."""
        self.token_limit = self.vocabulary
        """Number of token ids of the model from its configuration, otherwise of the tokenizer."""
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        closing = self._first_special(self.template.closing)
        known = {int(tokenizer.eos_token_id), *self._ends} | ({closing} if closing is not None else set())
        after_call = self._end_of_calls(known)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(known if after_call is None else known | {after_call}))
        """Tokens that end a reply. The model samples them, so they are trained on."""
        self._closers = self._closers_of_turns() if closing is not None else frozenset()

    @classmethod
    def load(cls, source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTokens:
        """Load the tokenizer of a model folder or hub name."""
        tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)
        chat = cls(tokenizer, ends=stored_ends(source, revision=revision))
        chat.token_limit = read_vocabulary_size(source, revision=revision) or chat.vocabulary
        return chat

    def called_with(self, arguments: Mapping[str, object]) -> ChatTokens:
        """Return the same tokenizer with these arguments of its template. Equal arguments give the same object.

        Raises:
            TemplateError: the template does not use an argument or fails with it.
        """
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._others:
            self._others[key] = ChatTokens(self._tokenizer, arguments, self._ends)
        return self._others[key]

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, array[int]]:
        """Return text and ids of a conversation that the model must answer, with the generation prompt. Thread-safe.

        Raises:
            TemplateError: the chat template refuses the conversation.
        """
        try:
            key = json.dumps([list(messages), list(tools)])
        except (TypeError, ValueError):
            return self._encode_opening(messages, tools)
        # The rollouts of a group start with the same prompt at the same time, and rendering it is half of a rollout's CPU time.
        with self._lock:
            known = self._openings.pop(key, None)
            found = known or Future()
            self._openings[key] = found
            if len(self._openings) > _OPENINGS:
                del self._openings[next(iter(self._openings))]
        if known is None:
            try:
                found.set_result(self._encode_opening(messages, tools))
            except BaseException as error:
                with self._lock:
                    self._openings.pop(key, None)
                found.set_exception(error)
        # Only threads wait here: a prompt rendered in the event loop is complete at this point.
        text, ids = found.result()
        return text, ids[:]

    def _encode_opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, array[int]]:
        if messages and messages[-1].get("role") == "assistant":
            raise TemplateError(PREFILLED)
        text = self.prompt(messages, tools)
        return text, self._tokenize_text(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of a conversation that the model must answer.

        Raises:
            TemplateError: the chat template refuses the conversation or drops one of its messages.
        """
        self.template.refuse_lost_messages(messages, tools)
        return self.template.write(messages, tools, generation_prompt=True)

    def continuation(
        self, messages: Sequence[Message], replies_at: int, sampled: int | Sequence[int], tools: Sequence[Tool] = ()
    ) -> array[int]:
        """Return the ids to append after the model's tokens.

        Args:
            messages: complete conversation with the new messages.
            replies_at: index of the model's latest reply; the later messages are new.
            sampled: last tokens that the model sampled, or only the last one.
            tools: functions that the model may call.

        Raises:
            TemplateError: the chat template refuses the conversation or drops one of the new messages.
        """
        return self.encode_appended(self.template.after_reply(messages, replies_at, tools), sampled)

    def encode_appended(self, text: str, sampled: int | Sequence[int] = ()) -> array[int]:
        """Return the ids of a text after sampled tokens, without an end of the turn that the model has already sampled.

        A reply cut by a limit gets the complete text.
        """
        added = self._tokenize_text(text)
        last = [sampled] if isinstance(sampled, int) else [*sampled[-SAMPLED_ENDS:]]
        if not last or last[-1] not in self.stop_token_ids:
            return added
        for known in (last, last[:-1]):  # the model may end a turn with another token than the template
            for count in range(min(len(known), len(added)), 0, -1):
                if known[-count:] == added[:count].tolist() and self._special.intersection(known[-count:]):
                    return added[count:] if known is last else self._without_closer(added[count:], last[-1])
        return self._without_closer(added, last[-1])

    def _without_closer(self, added: array[int], sampled: int) -> array[int]:
        """Remove the template's end of the turn with the whitespace before it, up to the sampled token if the end
        contains it.
        """
        first = next((index for index, id in enumerate(added) if id in self._special), None)
        if first is None or added[first] not in self._closers or self._tokenizer.decode(added[:first].tolist()).strip():
            return added
        run = list(takewhile(self._closers.__contains__, added[first:]))
        return added[first + (run.index(sampled) if sampled in run else 0) + 1 :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the complete text of a reply with special tokens, without the token that ended it."""
        ids = self.without_end(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return a reply without the token that ended it."""
        return list(token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids)

    def _first_special(self, text: str) -> int | None:
        """Return the special token at the start of a text, after whitespace, or None."""
        ids = self._tokenize_text(text)
        first = next((index for index, id in enumerate(ids) if id in self._special), None)
        if first is None or self._tokenizer.decode(ids[:first].tolist()).strip():
            return None
        return int(ids[first])

    def _end_of_calls(self, known: Collection[int]) -> int | None:
        """Return the token that ends a reply with calls if it is not a known end, otherwise None.

        It is the token after the calls (Harmony's `<|call|>`) or the token at the start of the result (GLM's
        `<|observation|>`). A token that closes each of several calls is part of the calls.
        """
        form = self.template.tool_form
        if form is None or not form.native:
            return None
        said: list[Message] = [{"role": "user", "content": "a"}, probe_call()]
        try:
            head = self.template.write(said, [PROBE_TOOL])
            after = self.template.after_reply([*said, probe_result()], 1, [PROBE_TOOL])
        except TemplateError:
            return None
        several = head
        with suppress(TemplateError):  # a template that renders only one call
            several = self.template.write([said[0], probe_call(calls=2)], [PROBE_TOOL])
        closing = self.template.closing_of(head)
        ends = [id for id in self._tokenize_text(closing) if id in self._special]
        if any(id in known for id in ends):
            return None
        if ends and self._count_token(several, ends[-1]) == self._count_token(head, ends[-1]):
            return ends[-1]
        return self._first_special(after[len(closing) :])

    def _count_token(self, text: str, id: int) -> int:
        return self._tokenize_text(text).count(id)

    def _closers_of_turns(self) -> frozenset[int]:
        """Return the tokens with which the template ends a reply: at the end, before a question, and after calls.

        The first token of the next message is not a closer. A closer is followed by another special token; such a first
        token is followed by text (GLM's `<|user|>`, Gemma 4's `<|tool_response>`).
        """
        said: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        closers = {self._first_special(self.template.closing)}
        with suppress(TemplateError):  # a template for one turn only
            closers.update(self._closers_in(self.template.after_reply([*said, said[0]], 1)))
        if (form := self.template.tool_form) is not None and form.native:
            with suppress(TemplateError):
                after = self.template.after_reply([said[0], probe_call(), probe_result()], 1, [PROBE_TOOL])
                closers.update(self._closers_in(after).intersection(self.stop_token_ids))
        return frozenset(id for id in closers if id is not None)

    def turn_end(self, text: str) -> int:
        """Return the length of the special tokens at the start of a text that the model samples to end a turn, or 0.

        Args:
            text: text of the template after a reply.
        """
        end = 0
        while (token := next((t for t in self.template.special_tokens if text.startswith(t, end)), None)) is not None:
            end += len(token)
            if self._tokenizer.convert_tokens_to_ids(token) in self.stop_token_ids:
                return end
            end += len(text[end:]) - len(text[end:].lstrip())
        return 0

    def _closers_in(self, text: str) -> set[int]:
        """Return the special tokens at the start of a text that are followed by another special token."""
        first = self._first_special(text)
        if first is None:
            return set()
        spelled = str(self._tokenizer.decode([first], skip_special_tokens=False))
        rest = text.partition(spelled)[2]
        if self._first_special(rest) is None:
            return set()
        return {first} | self._closers_in(rest).intersection(self.stop_token_ids)

    def _tokenize_text(self, text: str) -> array[int]:
        # Without unused columns: building them holds the GIL, the tokenizer itself does not.
        only = {"return_attention_mask": False, "return_token_type_ids": False}
        return array(INTEGERS, self._tokenizer(text, add_special_tokens=False, **only).input_ids)
