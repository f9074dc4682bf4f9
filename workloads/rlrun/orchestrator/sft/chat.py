"""Token ids and an exact loss mask of a conversation, for any chat template that writes a conversation from left to right.

What is learned of an assistant's message is what the model has to write: from the end of the generation prompt to the token that ends
the turn, included. Of other roles it is their text. The rendered text is cut at these places and each piece is tokenised alone, as the
prompt is at inference, so that no token lies across a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlrun.environments.protocol import Message, Tool
from rlrun.orchestrator.rollouts.chat_tokens import TemplateError
from rlrun.orchestrator.rollouts.tokenizer import load_tokenizer
from rlrun.orchestrator.sft.conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_IN = "@#content#@"


@dataclass(frozen=True)
class Encoded:
    """One conversation. Arrays are `[T]`."""

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    """Weight of each token in the loss; 0: not learned."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        return Encoded(self.input_ids[:length], self.weights[:length])


class ChatEncoder:
    """A tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with `chat_template`.

    Raises:
        TemplateError: it has no chat template, or its pieces do not make up the whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template; use a chat model or add chat_template to its tokenizer"
            )
        self._tokenizer = tokenizer
        self._special = sorted({str(token) for token in tokenizer.all_special_tokens if token}, key=len, reverse=True)
        probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _STAND_IN}]
        text = self._render(probe)
        _, found, closing = text.rpartition(_STAND_IN)
        if not found:
            raise TemplateError("the chat template drops the last assistant message, so there is nothing to learn")
        positions = [(closing.find(token), token) for token in self._special if token in closing]
        self.stop: str | None = min(positions)[1] if positions else None
        """Text of the token that ends an assistant's turn; None: the template has none."""
        text = text.replace(_STAND_IN, "b")
        if self._decode(self._tokenise(text)) != text:
            raise TemplateError(f"the tokenizer does not give back the chat template's text {text!r}")

    @classmethod
    def load(cls, source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatEncoder:
        """The tokenizer of a model folder or hub name."""
        return cls(load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code))

    def encode(self, chat: Conversation) -> Encoded:
        """Tokens and weights of a conversation.

        Raises:
            TemplateError: the template refuses it, or its messages cannot be separated.
        """
        text = self._render(chat.messages, chat.tools)
        ids: list[int] = []
        weights: list[float] = []
        end = 0
        for index, weight in enumerate(chat.weights):
            if not weight:
                continue
            start, stop = self._span(text, chat, index)
            if start < end:
                raise TemplateError(f"the chat template does not write message {index + 1} after the one before")
            for piece, value in ((text[end:start], 0.0), (text[start:stop], weight)):
                tokens = self._tokenise(piece)
                ids += tokens
                weights += [value] * len(tokens)
            end = stop
        tokens = self._tokenise(text[end:])
        ids += tokens
        weights += [0.0] * len(tokens)
        if weights:
            weights[0] = 0.0  # nothing comes before the first token, so it is never predicted
        return Encoded(np.array(ids, np.int32), np.array(weights, np.float32))

    # ---- where a message is

    def _span(self, text: str, chat: Conversation, index: int) -> tuple[int, int]:
        message = chat.messages[index]
        if message["role"] != "assistant" or index == 0:
            start, end = self._content(text, chat, index)
            return start, end + len(self.stop) if self.stop and text.startswith(self.stop, end) else end
        content = message["content"]
        if self.stop is not None and self.stop in content:
            raise TemplateError(f"message {index + 1} holds {self.stop}, the token that ends a turn")
        start = self._reply_start(text, chat, index)
        if self.stop is None:
            return start, self._content(text, chat, index)[1]
        end = text.find(self.stop, start)
        reply = text[start:end].strip()
        # Templates may leave out the thoughts of earlier turns, which come first; anything else must be there.
        if end < 0 or not (content.strip() in reply or content.endswith(reply)):
            raise TemplateError(f"the chat template changes the content of message {index + 1}")
        return start, end + len(self.stop)

    def _reply_start(self, text: str, chat: Conversation, index: int) -> int:
        """Index in `text` at which the generation prompt ends."""
        before = chat.messages[:index]
        prompt = self._render(before, chat.tools, generation_prompt=True)
        if not text.startswith(prompt):
            raise TemplateError(
                f"the chat template writes what is before message {index + 1} differently once the conversation goes on"
            )
        start = len(prompt)
        if prompt == self._render(before, chat.tools) and not chat.messages[index].get("tool_calls"):
            # No generation prompt: what stands before the content is the template's, unless it is but a blank.
            content, _ = self._content(text, chat, index)
            return content if text[start:content].strip() else start
        return start

    def _content(self, text: str, chat: Conversation, index: int) -> tuple[int, int]:
        """Start and end of a message's text, found by putting another in its place."""
        marked = [*chat.messages[:index], chat.messages[index] | {"content": _STAND_IN}, *chat.messages[index + 1 :]]
        before, *after = self._render(marked, chat.tools).split(_STAND_IN)
        if len(after) != 1 or not (text.startswith(before) and text.endswith(after[0])):
            raise TemplateError(f"the chat template does not let the text of message {index + 1} be found")
        return len(before), len(text) - len(after[0])

    # ---- the tokenizer

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[Tool] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the chat template refuses it: {error}") from error

    def _tokenise(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids] if text else []

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
