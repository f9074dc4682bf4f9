"""Orchestrator's end of the protocol with an environment's process."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from rlrun.environments.bounds import MAX_NAME_CHARACTERS, BoundsError, clip_text, describe_exception, plain_score
from rlrun.environments.episode import EpisodeError, ErrorKind
from rlrun.environments.process.wire import MAX_LINE_BYTES, Document, Lines, WireError, encode_document, encode_list
from rlrun.environments.protocol import Episode, Message, ModelClient, Reply, Score, Tool
from rlrun.environments.stage import MAX_NOTICES, Played, TaskRef

GRACE_SECONDS = 10.0
"""Time after an episode's deadline until the orchestrator gives up. The environment itself ends the episode at the deadline."""
MAX_GIVEN_UP = 10_000
"""Largest number of remembered rollouts without an answer. Their code may still run, and end the process."""
DeathKind = Literal["crash", "hang", "memory"]


@dataclass(frozen=True)
class Death:
    """Cause of a process's end."""

    kind: DeathKind
    message: str
    rollout: int = 0
    """Rollout whose code ran, or 0 if unknown."""
    task: TaskRef | None = None
    """Task that the rollout played."""


class StartError(Exception):
    """Error for a process that did not become ready.

    Args:
        message: reason.
        permanent: whether the environment itself reported the error, so that a retry is useless.
        missing: whether a package, the interpreter or data is missing on this machine, which a pod may have.
    """

    def __init__(self, message: str, *, permanent: bool = False, missing: bool = False) -> None:
        super().__init__(message)
        self.permanent, self.missing = permanent, missing


@dataclass
class _Rollout:
    task: TaskRef
    model: ModelClient
    result: asyncio.Future[Played | list[Score]]
    """Result: an episode, or the scores of a compared group."""
    members: int = 0
    """Number of compared episodes, or 0 if an episode is played."""
    asking: asyncio.Task[None] | None = None
    call: int = 0
    model_error: Exception | None = None


@dataclass
class Ready:
    """Description of a loaded environment."""

    id: str
    single_turn: bool
    compares: bool
    train: int
    eval: int
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about the data, for users."""
    digest: str = field(default="", compare=False)
    """Digest of the training tasks, see `splits.check_distinct`; "" if the environment's release of RLRun does not report it."""


class Talk(ABC):
    """One connection to an environment, from its start to its end. All methods must be called in the event loop that created the object.

    Args:
        id: id of the environment, for messages.
        number: number of this life of the environment, from 1.
    """

    def __init__(self, id: str, number: int) -> None:
        self.id, self.number = id, number
        self.played = 0
        """Number of successful episodes."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Death] = loop.create_future()
        """Cause of the end, set when all processes have ended."""
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._wire = Lines(self._receive_message, self._on_connection_lost)
        self._rollouts: dict[int, _Rollout] = {}
        self._given_up: dict[int, TaskRef] = {}
        """Rollouts without a waiter that the process has not answered, oldest first."""
        self._changed = asyncio.Event()

    @abstractmethod
    async def start(self) -> Ready:
        """Load the environment.

        Raises:
            StartError: the environment cannot be loaded, or its process ended or took too long.
        """

    @abstractmethod
    def end(self) -> None:
        """End the environment and all its processes now. Its rollouts get no result."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the highest `memory_gib` and the longest `stall_seconds` of the event loop so far."""

    @abstractmethod
    def _handle_pong(self, document: Document) -> None:
        """Handle the answer to a `ping`."""

    @abstractmethod
    def _on_connection_lost(self, error: WireError | None) -> None: ...

    def _add_advice(self, message: str) -> str:
        """Return the message of an environment's error with advice from this end."""
        return message

    async def until_idle(self) -> None:
        """Wait until no episode is running, or the environment has ended."""
        while self._rollouts and not self.ended.done():
            self._changed.clear()
            await self._changed.wait()

    @property
    def in_flight(self) -> int:
        """Number of running episodes."""
        return len(self._rollouts)

    def _report_end(self, death: Death) -> None:
        """Report the end to all waiting rollouts."""
        # The rollout whose code ran caused the end. It may have been given up already, while its code continued.
        culprit = self._rollouts.get(death.rollout)
        death = replace(death, task=culprit.task if culprit is not None else self._given_up.get(death.rollout))
        # The other rollouts are bystanders, but only if the cause is known: otherwise each of them may be the cause.
        for number, rollout in list(self._rollouts.items()):
            if not rollout.result.done():
                bystander = death.task is not None and death.rollout != number
                message = f"its process {death.message}"
                error = self._episode_error(death.kind, rollout.task, message, death=self.number, bystander=bystander)
                rollout.result.set_exception(error)
        if not self.ended.done():
            self.ended.set_result(death)

    # ---- episodes

    async def play(
        self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> Played:
        """Play one episode in the process; see `Stage.play`. Raises `EpisodeError`.

        Args:
            number: number of the rollout in the process. 0: create a new one.
        """
        rollout = _Rollout(task, model, asyncio.get_running_loop().create_future())
        played = await self._request_result(rollout, {"op": "play"}, timeout_seconds, reward_seconds, number)
        assert isinstance(played, Played)  # see `_set_result`
        return played

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> list[Score]:
        """Compare the episodes of a group in the process; see `Stage.compare`. Raises `EpisodeError`.

        Args:
            number: number of the comparison; see `play`.
        """
        members = [
            {"messages": one.episode.messages, "replies": one.episode.replies, **_read_numbers(one.score)}
            for one in group
        ]
        rollout = _Rollout(task, _NoModel(), asyncio.get_running_loop().create_future(), len(members))
        scores = await self._request_result(
            rollout, {"op": "compare"}, timeout_seconds, reward_seconds, number, members
        )
        assert isinstance(scores, list)  # see `_set_result`
        return scores

    async def _request_result(
        self,
        rollout: _Rollout,
        asked: Document,
        timeout_seconds: float,
        reward_seconds: float,
        number: int,
        members: Sequence[Document] = (),
    ) -> Played | list[Score]:
        """Send a request for a rollout or comparison, and wait for its result."""
        task = rollout.task
        number = (
            number or secrets.randbelow(1 << 62) + 1
        )  # random, so that an episode cannot guess and answer another one's number
        deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
        document = {**asked, "rollout": number, "split": task.split, "index": task.index, **deadlines}
        self._rollouts[number] = rollout  # registered before the first await, during which the process may end
        try:
            line = await encode_list(document, "members", members) if members else encode_document(document)
            if len(line) > MAX_LINE_BYTES:
                message = (
                    f"the group's episodes have {len(line)} bytes as JSON (at most {MAX_LINE_BYTES}); make them shorter"
                )
                raise self._episode_error("reward", task, message)
        except BaseException:
            del self._rollouts[number]
            self._changed.set()
            raise
        # `_report_end` has set the result already if the process ended while the line was encoded.
        if not rollout.result.done():
            self._wire.send_line(line)
        try:
            async with asyncio.timeout(timeout_seconds + GRACE_SECONDS):
                return await rollout.result
        except TimeoutError as error:
            raise self._episode_error(
                "timeout", task, f"the episode did not finish within {round(timeout_seconds, 3):g} seconds"
            ) from error
        finally:
            del self._rollouts[number]
            self._changed.set()
            if rollout.asking is not None:
                rollout.asking.cancel()
            if not rollout.result.done() or rollout.result.cancelled():
                self._give_up(number, task)

    def _give_up(self, number: int, task: TaskRef) -> None:
        self._wire.send({"op": "cancel", "rollout": number})
        self._given_up[number] = task
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def _episode_error(
        self, kind: ErrorKind, task: TaskRef, message: str, *, death: int = 0, bystander: bool = False
    ) -> EpisodeError:
        return EpisodeError(kind, self.id, str(task), message, death=death, bystander=bystander)

    async def _answer_call(self, number: int, rollout: _Rollout, document: Document) -> None:
        answer: Document = {"rollout": number, "call": document["call"]}
        try:
            reply = await rollout.model.complete(
                document["messages"],
                max_tokens=document["max_tokens"],
                stop=document["stop"],
                **({} if document["tools"] is None else {"tools": document["tools"]}),
            )
        except Exception as error:
            rollout.model_error = error
            self._wire.send({"op": "refused", **answer, "message": str(error)})
            return
        self._wire.send({"op": "reply", **answer, **vars(reply)})

    # ---- messages of the process

    def _receive_message(self, document: Document) -> None:
        try:
            self._handle_message(document)
        except WireError:
            raise
        except Exception as error:
            raise WireError(
                f"its message {clip_text(str(document['op']), 40)!r} is malformed ({describe_exception(error)})"
            ) from error

    def _handle_message(self, document: Document) -> None:
        if document["op"] == "pong":
            self._handle_pong(document)
            return
        if document["op"] in ("ready", "unusable"):
            if not self._ready.done():
                self._set_ready(document)
            return
        rollout = self._rollouts.get(int(document["rollout"]))
        if rollout is None or rollout.result.done():
            if document["op"] in ("played", "compared", "failed"):
                self._given_up.pop(int(document["rollout"]), None)
            return
        match document["op"]:
            case "complete":
                if rollout.asking is not None:
                    rollout.asking.cancel()  # only one call at a time is allowed
                rollout.call = int(document["call"])
                rollout.asking = asyncio.ensure_future(self._answer_call(int(document["rollout"]), rollout, document))
            case "abandon":
                if rollout.asking is not None and rollout.call == document["call"]:
                    rollout.asking.cancel()
            case "played" | "compared":
                self._set_result(rollout, document)
            case "failed":
                if (kind := document["kind"]) not in get_args(ErrorKind):
                    raise WireError(f"{clip_text(str(kind), 40)!r} is not a kind of error")
                task_id, message = (
                    clip_text(str(document["task_id"])),
                    self._add_advice(clip_text(str(document["message"]))),
                )
                error = EpisodeError(kind, self.id, task_id, message)
                if error.kind == "model":
                    error.__cause__ = rollout.model_error
                rollout.result.set_exception(error)
            case unknown:
                raise WireError(f"the message {unknown!r} is unknown")

    def _set_result(self, rollout: _Rollout, document: Document) -> None:
        if (document["op"] == "compared") != (rollout.members > 0):
            raise WireError(f"{document['op']!r} does not answer the request")
        try:
            rollout.result.set_result(
                _read_compared(document, rollout.members) if rollout.members else _read_played(document)
            )
            self.played += 1
        except BoundsError as refused:
            rollout.result.set_exception(self._episode_error("reward", rollout.task, str(refused)))

    def _set_ready(self, document: Document) -> None:
        if document["op"] == "unusable":
            self._ready.set_exception(
                StartError(self._add_advice(document["message"]), permanent=True, missing=bool(document.get("missing")))
            )
            return
        kind = bool(document["single_turn"]), bool(document["compares"])
        sizes = int(document["train"]), int(document["eval"])
        notices = tuple(clip_text(str(notice)) for notice in list(document.get("notices", ()))[:MAX_NOTICES])
        digest = clip_text(str(dict(document.get("digests", {})).get("train", "")), MAX_NAME_CHARACTERS)
        self._ready.set_result(Ready(str(document["id"]), *kind, *sizes, notices, digest))


class _NoModel:
    """Model client of a comparison, which must not use the model."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        raise RuntimeError("a comparison must not send requests to the policy")


def _read_numbers(score: Score) -> Document:
    return {"reward": score.reward, "metrics": score.metrics}


def _read_compared(document: Document, members: int) -> list[Score]:
    rewards, metrics = list(document["rewards"]), list(document["metrics"])
    if len(rewards) != members or len(metrics) != members:
        raise WireError(f"it returned {len(rewards)} rewards for {members} episodes")
    return [plain_score(Score(reward, of_one)) for reward, of_one in zip(rewards, metrics, strict=True)]


def _read_played(document: Document) -> Played:
    episode = Episode(list(document["messages"]), int(document["replies"]), dict(document["info"]))
    score = plain_score(Score(document["reward"], document["metrics"]))
    return Played(str(document["task_id"]), episode, score)
