"""Conversation of one rollout's environment with the policy, and the record of every sampled token.

A request that continues after a reply extends the same token sequence; each such sequence is one training sample. A
request that rewrites, summarizes or drops earlier messages starts a new sample. A request that returns to an earlier
reply copies the tokens up to it into a new sample, where they are not trained on. So no sample contains tokens in an
order that the engine did not see, and no sampled token is trained on twice.

The strategy determines the tokens of a new turn. `interleaved`: the text of the new messages, independent of how the
chat template would render earlier ones. `branching`: the template renders the complete conversation again, as for the
final model, and if the text differs from the earlier one (a template that drops earlier thoughts) a new sample starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rlrun.config.models.roles import TrajectoryStrategy
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.environments.tool_calls import arguments_of
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import PREFILLED, SAMPLED_ENDS, ChatTokens
from rlrun.orchestrator.rollouts.message_forms import ParseReply, ReplyParts, parse_text
from rlrun.orchestrator.types import Recorded
from rlrun.protocol.files.batch import NO_VERSION
from rlrun.protocol.files.routes import EngineRoutes, Routes, RoutesError, join_engine_routes
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS
from rlrun.runtime.background_compute import SMALL, compute_without_blocking

_NO_VERSION = array(INTEGERS, [NO_VERSION])
_CHARACTERS = 4
"""Approximate characters per token."""


class Generate(Protocol):
    """Request to an engine that holds the required version.

    `stop` contains additional stop texts of this request, on top of the run's; the stop text itself is sampled. `routes_start` is the first
    token whose experts are needed, if the run replays them.
    """

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = (), routes_start: int = 0
    ) -> Completion: ...


class RolloutError(Exception):
    """The rollout cannot be trained on: the prompt is too long or no token was sampled."""


class UnplayablePromptError(RolloutError):
    """The first prompt cannot be answered; every rollout of the task meets this error.

    Args:
        message: text for people.
        reason: name in metrics.
    """

    def __init__(self, message: str, reason: Literal["too_long", "template"]) -> None:
        super().__init__(message)
        self.reason = reason


class Mark(NamedTuple):
    """End of a reply in a sequence, after which the conversation may continue."""

    messages: int
    tokens: int
    text: int


@dataclass
class TokenSequence:
    """Growing tokens of one sequence. The four columns have one entry per token."""

    tools: list[Tool] | None = None
    """Functions offered to the model at the start."""
    token_ids: array[int] = field(default_factory=lambda: array(INTEGERS))
    mask: bytearray = field(default_factory=bytearray)
    """1 for sampled tokens that are trained on in this sequence."""
    logprobs: array[float] = field(default_factory=lambda: array(FLOATS))
    versions: array[int] = field(default_factory=lambda: array(INTEGERS))
    messages: list[Message] = field(default_factory=list)
    """Conversation up to and including the last reply."""
    text: str = ""
    """Conversation as the chat template has to render it; only used by `branching`."""
    marks: list[Mark] = field(default_factory=list)
    """Ends of all replies."""
    full: bool = False
    """Whether the limit of the sample's length is reached."""
    routes: list[EngineRoutes] = field(default_factory=list)
    """Experts of consecutive parts, as the engines chose them for the first request that computed a token."""

    @property
    def routed(self) -> int:
        """Number of first tokens with known experts. The last sampled token has none before the next request."""
        return self.routes[-1].start + len(self.routes[-1].experts) if self.routes else 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.mask.extend(bytes(count))
        self.logprobs.frombytes(bytes(count * self.logprobs.itemsize))
        self.versions.extend(_NO_VERSION * count)

    def sampled(self, completion: Completion, count: int) -> None:
        """Append the first `count` tokens of a completion."""
        self.token_ids.extend(completion.token_ids[:count])
        self.mask.extend(b"\x01" * count)
        self.logprobs.extend(completion.logprobs[:count])
        self.versions.extend(completion.versions[:count])
        if completion.routes is not None:
            # A later request computes earlier tokens again, perhaps with newer weights; their first experts count.
            start, experts = self.routed, completion.routes.experts
            self.routes.append(
                EngineRoutes(
                    start, experts[start - completion.routes.start : len(self.token_ids) - completion.routes.start]
                )
            )

    def latest(self, messages: Sequence[Message], tools: list[Tool] | None) -> Mark | None:
        """Return the last reply that `messages` continue, or None if they are another conversation."""
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
        """Return a new sequence with the tokens up to a reply, which are not trained on again."""
        copy = TokenSequence(self.tools, text=self.text[: mark.text])
        # Appended as tokens that are not sampled: the original sequence trains them, and a second
        # time would double their weight.
        copy.append(self.token_ids[: mark.tokens])
        copy.routes = [
            EngineRoutes(part.start, part.experts[: mark.tokens - part.start])
            for part in self.routes
            if part.start < mark.tokens
        ]
        return copy

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that are trained on."""
        return self.mask.count(1)


class _Place(NamedTuple):
    """Sequence and prompt for a request's reply."""

    sequence: TokenSequence
    new: bool
    """Whether the sequence is not yet part of the conversation."""
    added: array[int]
    """Tokens of the new messages."""
    text: str
    """Complete conversation; only used by `branching`."""


class Conversation:
    """`ModelClient` of one rollout.

    Args:
        generate: sender of requests.
        chat: tokenizer and chat template.
        seq_len: limit of a sequence in tokens; a longer reply is cut and marked as truncated.
        max_tokens: limit of a reply in tokens.
        strategy: content of a further turn, see the module.
        parse: parser of replies if tools were offered.
        parse_all: whether to parse every reply, to separate thoughts from content.
        stop: stop texts of the run.
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
        """Whether a token limit cut a reply."""
        self.tools: tuple[Tool, ...] = ()
        """Tools offered most recently."""
        self.texts: list[str] = []
        """Replies in order."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next assistant message; see `ModelClient`.

        A failed or canceled call leaves no trace. If the conversation no longer fits into a sample, the reply is empty
        and truncated and is not recorded.

        Raises:
            RolloutError: the last message is a reply.
            UnplayablePromptError: the first prompt leaves no space for a reply, or the chat template refuses it.
            TemplateError: the chat template refuses the conversation.
        """
        if self._sequences and messages and messages[-1].get("role") == "assistant":
            raise RolloutError(PREFILLED)
        self.tools = tuple(tools or ()) or self.tools
        place = await self._find_place(messages, None if tools is None else list(tools))
        prompt = place.sequence.token_ids + place.added
        # The engine must not sample tokens that the sample cannot hold: they would cost time and be
        # cut.
        room = min(self._seq_len - len(prompt), self._max_tokens, *([] if max_tokens is None else [max_tokens]))
        if place.sequence.full or room < 1:
            self._refuse_first_prompt(len(prompt))
            # Later turns of this sequence need at least as many tokens, so they fail without
            # another try.
            place.sequence.full = True
            return self._record_reply(place, messages, Reply("", "length", truncated=True, prompt_tokens=len(prompt)))
        completion = await self._request_reply(place.sequence, prompt, room, stop)
        _check_message(completion)
        words = (*self._stop, *stop)
        characters = len(completion.token_ids) * _CHARACTERS
        count, text, stopped = await compute_without_blocking(
            characters, partial(self._cut_completion, completion, words)
        )
        finish = "stop" if stopped else completion.finish_reason
        said = await self._parse_reply(completion.token_ids[:count], text, finish, tools or ())
        reply = Reply(
            text if said.text is None else said.text,
            finish,
            truncated=finish == "length",
            tool_calls=tuple(said.calls_as_messages(self._calls)),
            content=said.content,
            reasoning=said.reasoning,
            prompt_tokens=len(prompt),
            completion_tokens=count,
        )
        self._calls += len(said.calls)
        # Only now and without an `await`: up to here the call may have been canceled and repeated.
        place.sequence.append(place.added)
        place.sequence.sampled(completion, count)
        if self._branching:
            written = self._chat.decode_all(completion.token_ids[:count])
            # The environment's message has no stop text, so the template will not render it.
            place.sequence.text = place.text + (_text_before(written, words) if stopped else written)
        return self._record_reply(place, messages, reply)

    async def _request_reply(
        self, sequence: TokenSequence, prompt: array[int], room: int, stop: Sequence[str]
    ) -> Completion:
        options: dict[str, Any] = {"stop": tuple(stop)} if stop else {}
        if sequence.routed:
            options["routes_start"] = sequence.routed
        return await self._generate(prompt, max_tokens=room, **options)

    async def _find_place(self, messages: Sequence[Message], tools: list[Tool] | None) -> _Place:
        try:
            return await compute_without_blocking(
                _count_characters(messages), partial(self._place_reply, messages, tools)
            )
        except TemplateError as error:
            if self._sequences:
                raise
            raise UnplayablePromptError(str(error), "template") from error

    def _refuse_first_prompt(self, tokens: int) -> None:
        """Refuse a prompt without space for a reply if no token was sampled before it."""
        if any(known.loss_tokens for known in self._sequences):
            return
        message = (
            f"the prompt has {tokens} tokens, so seqLen ({self._seq_len}) leaves no room for a reply; increase seqLen"
        )
        if self._sequences:
            raise RolloutError(message)
        raise UnplayablePromptError(message, "too_long")

    async def _parse_reply(self, token_ids: Sequence[int], text: str, finish: str, tools: Sequence[Tool]) -> ReplyParts:
        if not self._parse_all and (not tools or finish == "length"):
            return ReplyParts()
        said = await self._parse(self._chat.without_end(token_ids), text, tools)
        return replace(said, calls=()) if finish == "length" else said  # the last call may be cut

    def recorded(self) -> list[Recorded]:
        """Return all sequences with tokens to train on.

        Raises:
            RolloutError: no sequence has any, or the experts of its answers differ in size.
        """
        found = [
            Recorded(
                np.array(s.token_ids, np.int32),
                np.array(s.mask, np.bool_),
                np.array(s.logprobs, np.float32),
                np.array(s.versions, np.int32),
                _join_routes(s),
            )
            for s in self._sequences
            if s.loss_tokens
        ]
        if not found:
            raise RolloutError("the policy did not sample a token")
        return found

    def _place_reply(self, messages: Sequence[Message], tools: list[Tool] | None) -> _Place:
        """Return sequence and prompt tokens for the reply to `messages`."""
        found = self._latest_reply(messages, tools)
        if found is None:
            opening, ids = self._chat.opening(messages, tools or ())
            return _Place(TokenSequence(tools), True, ids, opening)
        text = self._chat.prompt(messages, tools or ()) if self._branching else ""
        mark, sequence = found
        continues = mark == sequence.marks[-1]
        # A full sequence cannot grow. A fork from an earlier reply may still fit.
        if sequence.full and (continues or not mark.tokens):
            return _Place(sequence, False, array(INTEGERS), text)
        sampled = sequence.token_ids[max(0, mark.tokens - SAMPLED_ENDS) : mark.tokens]
        if not self._branching:
            added = self._chat.continuation(messages, mark.messages - 1, sampled, tools or ())
        # The template renders the earlier turns as they were sampled, so only the new text has to
        # be encoded, and the sampled tokens stay as they are.
        elif text.startswith(known := sequence.text[: mark.text]):
            added = self._chat.encode_appended(text[len(known) :], sampled)
        else:
            return _Place(TokenSequence(tools), True, self._chat.encode_appended(text), text)
        return _Place(sequence if continues else sequence.fork(mark), not continues, added, text)

    def _latest_reply(self, messages: Sequence[Message], tools: list[Tool] | None) -> tuple[Mark, TokenSequence] | None:
        """Return the latest reply that `messages` continue, in the newest sequence that contains it."""
        latest: tuple[Mark, TokenSequence] | None = None
        # The newest first: of two sequences with the same reply, the later one is the branch that
        # the environment continues.
        for sequence in reversed(self._sequences):
            mark = sequence.latest(messages, tools)
            if mark is not None and (latest is None or mark.messages > latest[0].messages):
                latest = mark, sequence
        return latest

    def _record_reply(self, place: _Place, messages: Sequence[Message], reply: Reply) -> Reply:
        sequence = place.sequence
        if place.new:
            self._sequences.append(sequence)
        sequence.messages = [*messages, reply.message]
        sequence.marks.append(Mark(len(sequence.messages), len(sequence.token_ids), len(sequence.text)))
        self.finish_reason = reply.finish_reason
        self.truncated = self.truncated or reply.truncated
        self.texts.append(reply.text)
        return reply

    def _cut_completion(self, completion: Completion, stop: Sequence[str]) -> tuple[int, str, bool]:
        """Return the number of kept tokens, their text, and whether a stop text ended them."""
        ids = completion.token_ids
        text = self._chat.decode(ids)
        if not any(word in text for word in stop):
            return len(ids), text, False
        # Binary search for the fewest tokens that contain a stop text: an engine with this stop text would have ended there.
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if any(word in self._chat.decode(ids[:middle]) for word in stop):
                high = middle
            else:
                low = middle + 1
        return low, _text_before(self._chat.decode(ids[:low]), stop), True


def _join_routes(sequence: TokenSequence) -> Routes | None:
    try:
        return join_engine_routes(sequence.routes, len(sequence.token_ids))
    except RoutesError as error:
        raise RolloutError(str(error)) from None


def _text_before(text: str, words: Sequence[str]) -> str:
    """Return the text before the first of these words."""
    return text[: min((text.index(word) for word in words if word in text), default=len(text))]


def _count_characters(messages: Sequence[Message]) -> int:
    """Count the characters of all texts in the messages and their parts, whatever form the content has. The count stops
    above `SMALL`.
    """
    size, rest = 0, list[object](messages)
    while rest and size <= SMALL:
        found = rest.pop()
        size += 1  # so that a million empty parts do not count as small
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, Mapping):
            rest += found.values()
        elif isinstance(found, list | tuple):
            rest += found
    return size


def _is_same_message(known: Message, given: Message) -> bool:
    """Return whether two messages are equal. Of a reply only content and calls count, because environments add other
    fields.
    """
    if known["role"] == "assistant" == given.get("role"):
        return (known.get("content") or "") == (given.get("content") or "") and _comparable_calls(
            known
        ) == _comparable_calls(given)
    return known == given


def _comparable_calls(message: Message) -> list[tuple[object, object, object]]:
    """Return calls in a comparable form, because programs serialize the JSON of the arguments differently."""
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
        raise RolloutError("the engine returned an empty reply")
