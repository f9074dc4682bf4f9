"""From messages to token ids and back, so that what the engine saw is what is trained on.

A conversation grows by appending: tokens that are there stay verbatim, only new messages are tokenised. What a chat template puts around
them is found by rendering the conversation with a stand-in for the model's own reply and taking what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlrun.environments.protocol import Message
from rlrun.orchestrator.tokenizer import load_tokenizer

_STAND_IN = "@#reply#@"


class TemplateError(ValueError):
    """The chat template cannot be used for training."""


class ChatTokens:
    """A tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with `chat_template`.

    Raises:
        TemplateError: it has no chat template or no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template; use a chat model or add chat_template to its tokenizer"
            )
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token, so no reply would ever end")
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        """Tokens that the tokenizer knows."""
        self._special = set(tokenizer.all_special_ids)
        stops = {int(tokenizer.eos_token_id)}
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _STAND_IN}]
        closing = self._tokenise(self._after_reply(probe, generation_prompt=False))
        if closing and closing[0] in self._special:
            stops.add(closing[0])  # base models often end their template's turns with another token than their eos
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        """Tokens that end a reply; the model samples them, so they are trained on."""

    @classmethod
    def load(cls, source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTokens:
        """The tokenizer of a model folder or hub name."""
        return cls(load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code))

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that the model is to answer, generation prompt included."""
        return self._tokenise(self._render(messages, generation_prompt=True))

    def continuation(self, messages: Sequence[Message], replies_at: int, last_token: int) -> list[int]:
        """Ids to append after the model's own tokens.

        Args:
            messages: the whole conversation, new messages included.
            replies_at: index of the model's latest reply; what follows it is new.
            last_token: the last token that the model sampled; a stop token is not repeated.
        """
        known = [*messages[:replies_at], {"role": "assistant", "content": _STAND_IN}, *messages[replies_at + 1 :]]
        added = self._tokenise(self._after_reply(known, generation_prompt=True))
        if added and added[0] == last_token and last_token in self.stop_token_ids:
            return added[1:]
        return added

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without stop and other special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
        return str(text)

    def _after_reply(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        _, found, after = self._render(messages, generation_prompt=generation_prompt).rpartition(_STAND_IN)
        if not found:
            raise TemplateError("the chat template drops an assistant message, so a conversation cannot be continued")
        return after

    def _tokenise(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids]
