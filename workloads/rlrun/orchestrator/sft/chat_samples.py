"""Token ids and an exact loss mask of a conversation, for any chat template that renders from left to right.

The learned part of an assistant message is the text that the model has to sample: from the end of the generation prompt
up to and including the token that ends the turn. If a template writes no end after the last reply (GLM), one is added.
Of other roles the learned part is their text. The rendered text is cut at these places and each piece is tokenized
separately, like the prompt at inference, so that no token crosses a border.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Message, Tool
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens, load_tokenizer, stored_ends
from rlrun.orchestrator.rollouts.message_forms import THOUGHT_FIELDS, thought_of
from rlrun.orchestrator.sft.chat_rows import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_STAND_IN = "@#content#@"
_OPEN, _CLOSE = "<think>", "</think>"
"""Tags of thoughts in the content of public data sets."""


@dataclass(frozen=True)
class Encoded:
    """Tokens of one conversation. Arrays are `[T]`."""

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    """Weight of each token in the loss; 0 for tokens that are not learned."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> Encoded:
        """Return the first `length` tokens."""
        return Encoded(self.input_ids[:length], self.weights[:length])


class ChatEncoder:
    """A tokenizer and its chat template.

    Args:
        tokenizer: Hugging Face tokenizer with `chat_template`.
        ends: tokens that end a reply by the model's `generation_config.json`.

    Raises:
        TemplateError: the tokenizer has no chat template, or does not reproduce the template's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> None:
        self._chat = ChatTokens(tokenizer, ends=ends)
        self._template, self._tokenizer = self._chat.template, tokenizer
        self._ends = [self._decode_ids([id]) for id in self._chat.stop_token_ids]
        """Texts of the tokens that end a turn."""
        probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self._render_text(probe)
        if self._decode_ids(self._tokenize_text(text)) != text:
            raise TemplateError(f"the tokenizer does not reproduce the chat template's text {text!r}")

    @classmethod
    def load(cls, source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatEncoder:
        """Load the tokenizer of a model folder or hub name."""
        tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)
        return cls(tokenizer, stored_ends(source, revision=revision))

    def encode(self, chat: Conversation) -> Encoded:
        """Return tokens and weights of a conversation.

        Raises:
            TemplateError: the template refuses the conversation, or its messages cannot be located in the text.
        """
        if self._template.thought_field is not None:
            chat = replace(chat, messages=[_separate_thought(m, i) for i, m in enumerate(chat.messages, 1)])
        self._template.refuse_lost_messages(chat.messages, chat.tools or ())
        text = self._render_text(chat.messages, chat.tools)
        ids: list[int] = []
        weights: list[float] = []
        end = 0
        is_ended = False
        for index, weight in enumerate(chat.weights):
            if not weight:
                continue
            start, stop, ends = self._learned_span(text, chat, index)
            if chat.messages[index]["role"] == "assistant":
                is_ended = is_ended or ends
                if not ends and index == len(chat.messages) - 1:
                    text, stop, is_ended = text[:stop] + self._last_end, stop + len(self._last_end), True
            if start < end:
                raise TemplateError(f"the chat template does not render message {index + 1} after message {index}")
            for piece, value in ((text[end:start], 0.0), (text[start:stop], weight)):
                tokens = self._tokenize_text(piece)
                ids += tokens
                weights += [value] * len(tokens)
            end = stop
        tokens = self._tokenize_text(text[end:])
        ids += tokens
        weights += [0.0] * len(tokens)
        if not is_ended and any(
            w and m["role"] == "assistant" for w, m in zip(chat.weights, chat.messages, strict=True)
        ):
            raise TemplateError(
                "no learned reply ends with an end-of-turn token, so the model would never stop; "
                "make the last message a learned reply"
            )
        if weights:
            weights[0] = 0.0  # the first token has no prefix, so it is never predicted
        return Encoded(np.array(ids, np.int32), np.array(weights, np.float32))

    # ---- location of a message

    def _learned_span(self, text: str, chat: Conversation, index: int) -> tuple[int, int, bool]:
        """Return start and end of the learned part of a message, and whether it contains a token that ends a turn."""
        message = chat.messages[index]
        if message["role"] != "assistant" or index == 0:
            start, end = self._content_span(text, chat, index)
            closing = next((token for token in self._ends if text.startswith(token, end)), "")
            return start, end + len(closing), bool(closing)
        content = content_text(message.get("content"), f"message {index + 1}")
        if held := next((token for token in self._ends if token in content), None):
            raise TemplateError(
                f"message {index + 1} contains {held}, the token that ends a turn; remove it from the content"
            )
        start = self._reply_start(text, chat, index)
        after = self._template.after_reply(chat.messages, index, chat.tools or (), generation_prompt=False)
        end = len(text) - len(after)
        reply = text[start:end].strip()
        # Templates without a thought field may drop thoughts in the content; all other text must be present.
        rest = _split_thought(content)[1].strip()
        if not text.endswith(after) or not (content.strip() in reply or rest == reply):
            raise TemplateError(f"the chat template changes the content of message {index + 1}")
        _refuse_lost_parts(chat.messages, index, content, reply)
        ending = self._chat.turn_end(after)
        return start, end + ending, ending > 0

    @cached_property
    def _last_end(self) -> str:
        """Text that ends the last reply if the template writes none: the end of a reply before a question, otherwise
        eos.
        """
        turn: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with suppress(TemplateError):
            after = self._template.after_reply([*turn, turn[0]], 1)
            if length := self._chat.turn_end(after):
                return after[:length]
        return str(self._tokenizer.eos_token)

    def _reply_start(self, text: str, chat: Conversation, index: int) -> int:
        """Return the index in `text` at which the generation prompt ends."""
        before = chat.messages[:index]
        prompt, bare = (
            self._render_text(before, chat.tools, generation_prompt=True),
            self._render_text(before, chat.tools),
        )
        start = len(prompt) if text.startswith(prompt) else self._common_start(text, chat, index)
        if prompt == bare and not chat.messages[index].get("tool_calls"):
            # Without a generation prompt, the text before the content belongs to the template, unless it is only whitespace.
            content, _ = self._content_span(text, chat, index)
            return content if text[start:content].strip() else start
        return start

    def _common_start(self, text: str, chat: Conversation, index: int) -> int:
        """Return the end of the common tokens of the generation prompt and the rendered reply after the previous
        message.

        Templates of thinking models open a thought in the generation prompt and render earlier replies without one.
        Other templates render earlier text differently after the conversation continues (Mistral puts the system
        message before the last question), so only the text after the previous message is compared.
        """
        last = chat.messages[index - 1] | {"content": _STAND_IN}
        before = [*chat.messages[: index - 1], last]
        bare = self._after_mark(self._render_text(before, chat.tools), index)
        asked = self._after_mark(self._render_text(before, chat.tools, generation_prompt=True), index)
        written = self._after_mark(self._render_text([*before, *chat.messages[index:]], chat.tools), index)
        pair = self._tokenize_text(asked), self._tokenize_text(written)
        same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))
        common = self._decode_ids(pair[0][:same])
        is_whole = asked.startswith(bare) and (len(common) > len(bare) or common == asked)
        if not (is_whole and text.endswith(written)):
            raise TemplateError(
                f"the chat template renders the text before message {index + 1} differently after the conversation continues"
            )
        return len(text) - len(written) + len(common)

    def _after_mark(self, text: str, index: int) -> str:
        _, *after = text.split(_STAND_IN)
        if len(after) != 1:
            raise TemplateError(f"cannot locate the text of message {index} in the output of the chat template")
        return after[0]

    def _content_span(self, text: str, chat: Conversation, index: int) -> tuple[int, int]:
        """Return start and end of a message's text, located with a placeholder in its place."""
        marked = [*chat.messages[:index], chat.messages[index] | {"content": _STAND_IN}, *chat.messages[index + 1 :]]
        before, *after = self._render_text(marked, chat.tools).split(_STAND_IN)
        if len(after) != 1 or not (text.startswith(before) and text.endswith(after[0])):
            raise TemplateError(f"cannot locate the text of message {index + 1} in the output of the chat template")
        return len(before), len(text) - len(after[0])

    # ---- the tokenizer

    def _render_text(
        self,
        messages: Sequence[Message],
        tools: list[Tool] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        return self._template.write(messages, tools or (), generation_prompt=generation_prompt)

    def _tokenize_text(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids] if text else []

    def _decode_ids(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _separate_thought(message: Message, number: int) -> Message:
    """Return a reply with the thoughts from tags at the start of its content moved to the thought field.

    Most public data sets store thoughts in tags. A template with a thought field renders the field as its models sample
    it, but would render the tags as part of the answer (GPT-OSS, Gemma 4) or after an empty thought (Qwen 3.8).

    Args:
        message: message of a row.
        number: number of the message, for errors.

    Raises:
        TemplateError: the reply also has thoughts in the field, or a thought without an end.
    """
    if message["role"] != "assistant":
        return message
    content = content_text(message.get("content"), f"message {number}")
    thought, rest = _split_thought(content)
    if rest == content:
        if content.lstrip().startswith(_OPEN):
            raise TemplateError(
                f"message {number} has {_OPEN} without {_CLOSE} in its content; add {_CLOSE} after the thoughts"
            )
        return message
    if thought_of(message):
        raise TemplateError(
            f"message {number} has thoughts both in {THOUGHT_FIELDS[0]} and in its content; remove them from the content"
        )
    return message | {"content": rest} | ({THOUGHT_FIELDS[0]: thought} if thought else {})


def _split_thought(content: str) -> tuple[str, str]:
    """Split a content into its initial thought and the rest. The opening tag may be missing, as after a generation
    prompt.
    """
    thought, end, rest = content.partition(_CLOSE)
    before, _, inner = thought.rpartition(_OPEN)
    if not end or before.strip():
        return "", content
    return inner.strip(), rest.lstrip()


def _refuse_lost_parts(messages: Sequence[Message], index: int, content: str, reply: str) -> None:
    """Refuse a learned reply if the template drops a call, or thoughts of the last turn.

    Templates drop the thoughts of earlier turns, and the model sees those turns without them.

    Args:
        messages: complete conversation.
        index: index of the reply.
        content: content of the reply.
        reply: rendered reply.

    Raises:
        TemplateError: a part is dropped; the error names the message and the part.
    """
    place = 0
    for call in messages[index].get("tool_calls") or ():
        place = reply.find(call["function"]["name"], place) + 1
        if not place:
            raise TemplateError(
                f"the chat template drops a call of message {index + 1}; put each call into a separate message"
            )
    if index != len(messages) - 1:
        return
    for thought in (thought_of(messages[index]), _split_thought(content)[0]):
        if thought.strip() not in reply:
            raise TemplateError(
                f"the chat template drops the thoughts of message {index + 1}; remove them from the row, or use a chat "
                "template that renders them"
            )
