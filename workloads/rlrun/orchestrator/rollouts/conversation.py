"""The policy as one rollout's environment sees it, and the record of every token that it samples.

A conversation that goes on where a reply ended continues the same tokens; each such chain is one training sample. One that rewrites,
summarises or forgets what was said starts a new sample, and one that goes back to an earlier reply takes its tokens up to there over
into a new sample, where they are no longer trained on. So no sample holds tokens in an order that the engine did not see, and none that
was sampled is trained on twice.

What a new turn adds is up to the strategy. `interleaved`: the text of the new messages, whatever the chat template would do to earlier
ones. `branching`: the template writes the whole conversation again, as it would be written for the finished model, and where that is not
what was said before (a template that drops earlier thoughts) a new sample starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rlrun.config.models.roles import TrajectoryStrategy
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.environments.tool_calls import arguments_of
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import PREFILLED, SAMPLED_ENDS, ChatTokens
from rlrun.orchestrator.rollouts.tool_parsing import ParseReply, Said, parse_text
from rlrun.orchestrator.types import Recorded
from rlrun.protocol.files.batch import NO_VERSION
from rlrun.protocol.messages.packed import FLOATS, INTEGERS
from rlrun.runtime.compute import SMALL, compute

_NO_VERSION = array(INTEGERS, [NO_VERSION])
_CHARACTERS = 4
"""Characters of a token's text, roughly."""


class Generate(Protocol):
    """One request to an engine that holds the version it is meant for.

    `stop` are texts of this request that end the reply, beyond those of the run; the text itself is sampled.
    """

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Completion: ...


class RolloutError(Exception):
    """A rollout that cannot be trained on: the prompt is too long, or nothing was sampled."""


class UnplayablePromptError(RolloutError):
    """A first prompt that cannot be asked: every rollout of the task meets it.

    Args:
        message: for people.
        reason: name of it in metrics.
    """

    def __init__(self, message: str, reason: Literal["too_long", "template"]) -> None:
        super().__init__(message)
        self.reason = reason


class Mark(NamedTuple):
    """End of a reply in a sequence: from here the conversation may go on."""

    messages: int
    tokens: int
    text: int


@dataclass
class TokenSequence:
    """Tokens of one sequence as they come; the four columns have one entry per token."""

    tools: list[Tool] | None = None
    """Functions that were offered to the model at its beginning."""
    token_ids: array[int] = field(default_factory=lambda: array(INTEGERS))
    mask: bytearray = field(default_factory=bytearray)
    """1 on tokens that the policy sampled, and that no other sequence holds as such."""
    logprobs: array[float] = field(default_factory=lambda: array(FLOATS))
    versions: array[int] = field(default_factory=lambda: array(INTEGERS))
    messages: list[Message] = field(default_factory=list)
    """The conversation up to and with the last reply."""
    text: str = ""
    """The conversation as the chat template has to write it; only kept in branching."""
    marks: list[Mark] = field(default_factory=list)
    """The ends of all replies."""
    full: bool = False
    """No room is left below the longest sample."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.mask.extend(bytes(count))
        self.logprobs.frombytes(bytes(count * self.logprobs.itemsize))
        self.versions.extend(_NO_VERSION * count)

    def sampled(self, completion: Completion, count: int) -> None:
        """The first `count` tokens of a completion."""
        self.token_ids.extend(completion.token_ids[:count])
        self.mask.extend(b"\x01" * count)
        self.logprobs.extend(completion.logprobs[:count])
        self.versions.extend(completion.versions[:count])

    def latest(self, messages: Sequence[Message], tools: list[Tool] | None) -> Mark | None:
        """The last reply that `messages` go on after; None: they are another conversation."""
        if tools != self.tools:
            return None
        found = None
        known = 0
        for mark in self.marks:
            if mark.messages >= len(messages) or not all(
                map(_is_same_message, self.messages[known : mark.messages], messages[known : mark.messages])
            ):
                break
            found, known = mark, mark.messages
        return found

    def fork(self, mark: Mark) -> TokenSequence:
        """A new sequence that begins like this one up to a reply; nothing of that is trained on again."""
        copy = TokenSequence(self.tools, text=self.text[: mark.text])
        copy.append(self.token_ids[: mark.tokens])
        return copy

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return self.mask.count(1)


class _Place(NamedTuple):
    """Place of a request's reply."""

    sequence: TokenSequence
    new: bool
    """True if the sequence is none of the conversation's yet."""
    added: array[int]
    """Tokens of the new messages."""
    text: str
    """The whole conversation; only in branching."""


class Conversation:
    """One rollout's `ModelClient`.

    Args:
        generate: sends a request.
        chat: tokenizer and template.
        seq_len: longest sequence, in tokens; a reply that would exceed it is cut and marked as truncated.
        max_tokens: longest reply, in tokens.
        strategy: what a further turn adds, see above.
        parse: takes a reply apart, if tools were offered.
        parse_all: take every reply apart, because its thoughts are to be kept apart from what it says.
    """

    def __init__(
        self,
        generate: Generate,
        chat: ChatTokens,
        *,
        seq_len: int,
        max_tokens: int,
        strategy: TrajectoryStrategy = "interleaved",
        parse: ParseReply = parse_text,
        parse_all: bool = False,
        stop: Sequence[str] = (),
    ) -> None:
        self._stop, self._parse_all = tuple(stop), parse_all
        self._generate, self._chat, self._parse = generate, chat, parse
        self._seq_len, self._max_tokens = seq_len, max_tokens
        self._branching = strategy == "branching"
        self._sequences: list[TokenSequence] = []
        self._calls = 0
        self.finish_reason = ""
        """Reason why the last reply ended."""
        self.truncated = False
        """True if a reply was cut by a token limit."""
        self.tools: tuple[Tool, ...] = ()
        """Tools that were offered last."""
        self.texts: list[str] = []
        """The replies in order."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next assistant message; see `ModelClient`.

        A call that fails or is cancelled leaves nothing behind. Where the conversation no longer fits into a sample the reply is
        empty and truncated, and nothing of it is recorded.

        Raises:
            RolloutError: the last message is a reply.
            UnplayablePromptError: the first prompt alone leaves no room for a reply, or the chat template refuses it.
            TemplateError: the chat template refuses the conversation.
        """
        if self._sequences and messages and messages[-1].get("role") == "assistant":
            raise RolloutError(PREFILLED)
        self.tools = tuple(tools or ()) or self.tools
        place = await self._find_place(messages, None if tools is None else list(tools))
        prompt = place.sequence.token_ids + place.added
        room = min(self._seq_len - len(prompt), self._max_tokens, *([] if max_tokens is None else [max_tokens]))
        if place.sequence.full or room < 1:
            self._refuse_first_prompt(len(prompt))
            place.sequence.full = True
            return self._reply(place, messages, Reply("", "length", truncated=True, prompt_tokens=len(prompt)))
        completion = await self._generate(prompt, max_tokens=room, **({"stop": tuple(stop)} if stop else {}))
        _check_message(completion)
        words = (*self._stop, *stop)
        characters = len(completion.token_ids) * _CHARACTERS
        count, text, stopped = await compute(characters, partial(self._cut, completion, words))
        finish = "stop" if stopped else completion.finish_reason
        said = await self._take_apart(completion.token_ids[:count], text, finish, tools or ())
        reply = Reply(
            text if said.text is None else said.text,
            finish,
            truncated=finish == "length",
            tool_calls=tuple(said.messages_calls(self._calls)),
            content=said.content,
            reasoning=said.reasoning,
            prompt_tokens=len(prompt),
            completion_tokens=count,
        )
        self._calls += len(said.calls)
        # Only now, in one step: until here the call may have been given up and made again.
        place.sequence.append(place.added)
        place.sequence.sampled(completion, count)
        if self._branching:
            written = self._chat.spelled(completion.token_ids[:count])
            # The environment's message has no stop text, so the template will not write it again.
            place.sequence.text = place.text + (_text_before(written, words) if stopped else written)
        return self._reply(place, messages, reply)

    async def _find_place(self, messages: Sequence[Message], tools: list[Tool] | None) -> _Place:
        try:
            return await compute(_count_characters(messages), partial(self._place, messages, tools))
        except TemplateError as error:
            if self._sequences:
                raise
            raise UnplayablePromptError(str(error), "template") from error

    def _refuse_first_prompt(self, tokens: int) -> None:
        """Refuse a prompt without room for a reply if nothing was sampled before it."""
        if any(known.loss_tokens for known in self._sequences):
            return
        message = (
            f"the prompt has {tokens} tokens, and seqLen ({self._seq_len}) leaves no room for a reply; raise seqLen"
        )
        if self._sequences:
            raise RolloutError(message)
        raise UnplayablePromptError(message, "too_long")

    async def _take_apart(self, token_ids: Sequence[int], text: str, finish: str, tools: Sequence[Tool]) -> Said:
        if not self._parse_all and (not tools or finish == "length"):
            return Said()
        said = await self._parse(self._chat.unended(token_ids), text, tools)
        return replace(said, calls=()) if finish == "length" else said  # the last call may be cut

    def recorded(self) -> list[Recorded]:
        """All sequences with tokens to train on.

        Raises:
            RolloutError: there is none.
        """
        found = [
            Recorded(
                np.array(s.token_ids, np.int32),
                np.array(s.mask, np.bool_),
                np.array(s.logprobs, np.float32),
                np.array(s.versions, np.int32),
            )
            for s in self._sequences
            if s.loss_tokens
        ]
        if not found:
            raise RolloutError("the policy sampled no token")
        return found

    def _place(self, messages: Sequence[Message], tools: list[Tool] | None) -> _Place:
        """Place of the reply to `messages`."""
        found = self._latest(messages, tools)
        if found is None:
            opening, ids = self._chat.opening(messages, tools or ())
            return _Place(TokenSequence(tools), True, ids, opening)
        text = self._chat.prompt(messages, tools or ()) if self._branching else ""
        mark, sequence = found
        goes_on = mark == sequence.marks[-1]
        if sequence.full and (goes_on or not mark.tokens):
            return _Place(sequence, False, array(INTEGERS), text)
        sampled = sequence.token_ids[max(0, mark.tokens - SAMPLED_ENDS) : mark.tokens]
        if not self._branching:
            added = self._chat.continuation(messages, mark.messages - 1, sampled, tools or ())
        elif text.startswith(known := sequence.text[: mark.text]):
            added = self._chat.appended(text[len(known) :], sampled)
        else:
            return _Place(TokenSequence(tools), True, self._chat.appended(text), text)
        return _Place(sequence if goes_on else sequence.fork(mark), not goes_on, added, text)

    def _latest(self, messages: Sequence[Message], tools: list[Tool] | None) -> tuple[Mark, TokenSequence] | None:
        """The latest reply that `messages` go on after, of the newest sequence that has it."""
        latest: tuple[Mark, TokenSequence] | None = None
        for sequence in reversed(self._sequences):
            mark = sequence.latest(messages, tools)
            if mark is not None and (latest is None or mark.messages > latest[0].messages):
                latest = mark, sequence
        return latest

    def _reply(self, place: _Place, messages: Sequence[Message], reply: Reply) -> Reply:
        sequence = place.sequence
        if place.new:
            self._sequences.append(sequence)
        sequence.messages = [*messages, reply.message]
        sequence.marks.append(Mark(len(sequence.messages), len(sequence.token_ids), len(sequence.text)))
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
        return low, _text_before(self._chat.decode(ids[:low]), stop), True


def _text_before(text: str, words: Sequence[str]) -> str:
    """Return the text before the first of these words."""
    return text[: min((text.index(word) for word in words if word in text), default=len(text))]


def _count_characters(messages: Sequence[Message]) -> int:
    """Characters of all texts in the messages, whatever form their content has, and their parts; more than `SMALL` is not counted on."""
    size, rest = 0, list[object](messages)
    while rest and size <= SMALL:
        found = rest.pop()
        size += 1  # a million empty parts are no small message
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, Mapping):
            rest += found.values()
        elif isinstance(found, list | tuple):
            rest += found
    return size


def _is_same_message(known: Message, given: Message) -> bool:
    """True if a message is one that was there before; of a reply only what was said counts, environments add fields of their own."""
    if known["role"] == "assistant" == given.get("role"):
        return (known.get("content") or "") == (given.get("content") or "") and _comparable_calls(
            known
        ) == _comparable_calls(given)
    return known == given


def _comparable_calls(message: Message) -> list[tuple[object, object, object]]:
    """Calls as they compare: programs serialize the arguments' JSON again."""
    return [
        (call.get("id"), call["function"]["name"], arguments_of(call["function"]))
        for call in message.get("tool_calls") or ()
    ]


def _check_message(completion: Completion) -> None:
    count = len(completion.token_ids)
    if not count == len(completion.logprobs) == len(completion.versions):
        raise RolloutError(
            f"{count} tokens came with {len(completion.logprobs)} log-probs and {len(completion.versions)} versions"
        )
    if not count:
        raise RolloutError("the engine answered with no token")
