"""The policy as one rollout's environment sees it, and the record of every token that it samples.

A conversation that extends what was said before continues the same sequence ("interleaved": one training sample for many turns); any other
one (an environment that rewrites or forgets) starts a new sequence ("branch"), so that no sample ever holds tokens in an order that the
engine did not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlrun.environments.protocol import Message, Reply
from rlrun.inference.client import Completion
from rlrun.orchestrator.tokens import ChatTokens
from rlrun.protocol.batch import NO_VERSION


class Generate(Protocol):
    """One request to an engine that holds the version it is meant for."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion: ...


class RolloutError(Exception):
    """A rollout that cannot be trained on: the prompt is too long, or nothing was sampled."""


@dataclass
class TokenSequence:
    """Tokens of one sequence as they come; the four lists have one entry per token."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True on tokens that the policy sampled."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The conversation up to and with the last reply."""
    full: bool = False
    """No room is left below the longest sample."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.mask += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [NO_VERSION] * count

    def sampled(self, completion: Completion, count: int) -> None:
        """The first `count` tokens of a completion."""
        self.token_ids += completion.token_ids[:count]
        self.mask += [True] * count
        self.logprobs += completion.logprobs[:count]
        self.versions += completion.versions[:count]

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(self.mask)


@dataclass(frozen=True)
class Recorded:
    """One finished sequence, columns as in `rlrun.protocol.batch.Sample`, all `[T]`."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


class Conversation:
    """One rollout's `ModelClient`.

    Args:
        generate: sends a request.
        chat: tokenizer and template.
        seq_len: longest sequence, in tokens; a reply that would exceed it is cut and marked as truncated.
        max_tokens: longest reply, in tokens.
    """

    def __init__(self, generate: Generate, chat: ChatTokens, *, seq_len: int, max_tokens: int) -> None:
        self._generate, self._chat = generate, chat
        self._seq_len, self._max_tokens = seq_len, max_tokens
        self._sequences: list[TokenSequence] = []
        self.finish_reason = ""
        """Why the last reply ended."""
        self.truncated = False
        """Whether a reply was cut by a token limit."""
        self.texts: list[str] = []
        """The replies in order."""

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Sample the next assistant message; see `ModelClient`.

        Raises:
            RolloutError: the prompt alone leaves no room for a reply.
        """
        sequence = self._continue(messages) or self._start(messages)
        room = min(self._seq_len - len(sequence.token_ids), self._max_tokens)
        if max_tokens is not None:
            room = min(room, max_tokens)
        if sequence.full or room < 1:
            sequence.full = True
            return self._reply(sequence, messages, Reply("", "length", truncated=True))
        completion = await self._generate(sequence.token_ids, max_tokens=room)
        _check(completion)
        count, text, stopped = self._cut(completion, stop)
        sequence.sampled(completion, count)
        finish = "stop" if stopped else completion.finish_reason
        return self._reply(sequence, messages, Reply(text, finish, truncated=finish == "length"))

    def recorded(self) -> list[Recorded]:
        """All sequences with tokens to train on.

        Raises:
            RolloutError: there is none.
        """
        found = [
            Recorded(
                np.asarray(s.token_ids, np.int32),
                np.asarray(s.mask, np.bool_),
                np.asarray(s.logprobs, np.float32),
                np.asarray(s.versions, np.int32),
            )
            for s in self._sequences
            if s.loss_tokens
        ]
        if not found:
            raise RolloutError("the policy sampled no token")
        return found

    def _start(self, messages: Sequence[Message]) -> TokenSequence:
        token_ids = self._chat.encode(messages)
        if len(token_ids) >= self._seq_len:
            raise RolloutError(
                f"the prompt has {len(token_ids)} tokens, and seqLen ({self._seq_len}) leaves no room for a reply; raise seqLen"
            )
        sequence = TokenSequence()
        sequence.append(token_ids)
        self._sequences.append(sequence)
        return sequence

    def _continue(self, messages: Sequence[Message]) -> TokenSequence | None:
        """The newest sequence that `messages` extend, with the new messages' tokens appended; None when there is none."""
        for sequence in reversed(self._sequences):
            known = len(sequence.messages)
            if known and known < len(messages) and all(map(_same, sequence.messages, messages)):
                if not sequence.full:
                    added = self._chat.continuation(messages, known - 1, sequence.token_ids[-1])
                    if len(sequence.token_ids) + len(added) >= self._seq_len:
                        sequence.full = True
                    else:
                        sequence.append(added)
                return sequence
        return None

    def _reply(self, sequence: TokenSequence, messages: Sequence[Message], reply: Reply) -> Reply:
        sequence.messages = [*messages, reply.message]
        self.finish_reason = reply.finish_reason
        self.truncated = self.truncated or reply.truncated
        self.texts.append(reply.text)
        return reply

    def _cut(self, completion: Completion, stop: Sequence[str]) -> tuple[int, str, bool]:
        """Tokens that are kept, their text, and whether one of the strings `stop` ended them."""
        ids = completion.token_ids
        text = self._chat.decode(ids)
        if not any(word in text for word in stop):
            return len(ids), text, False
        # The fewest tokens that spell a stop string: the policy would have ended there had the engine known the string.
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if any(word in self._chat.decode(ids[:middle]) for word in stop):
                high = middle
            else:
                low = middle + 1
        text = self._chat.decode(ids[:low])
        return low, text[: min(text.index(word) for word in stop if word in text)], True


def _same(known: Message, given: Message) -> bool:
    """Whether a message is one that was there before; of a reply only the text counts, environments add fields of their own."""
    if known["role"] == "assistant" == given.get("role"):
        return bool(known["content"] == given.get("content"))
    return known == given


def _check(completion: Completion) -> None:
    count = len(completion.token_ids)
    if not count == len(completion.logprobs) == len(completion.versions):
        raise RolloutError(
            f"{count} tokens came with {len(completion.logprobs)} log-probs and {len(completion.versions)} versions"
        )
    if not count:
        raise RolloutError("the engine answered with no token")
