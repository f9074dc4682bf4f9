"""The orchestrator's end of the protocol with an environment, wherever that runs."""

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
"""Time after an episode's deadline, at which the environment ends it, until it is given up from here."""
MAX_GIVEN_UP = 10_000
"""Rollouts without an answer that are remembered: their code may run on and end the process."""
DeathKind = Literal["crash", "hang", "memory"]


@dataclass(frozen=True)
class Death:
    """Cause of a process's end."""

    kind: DeathKind
    message: str
    rollout: int = 0
    """Rollout whose code ran; 0: it is not known."""
    task: TaskRef | None = None
    """Task that the rollout played."""


class StartError(Exception):
    """The process did not become ready.

    Args:
        message: why.
        permanent: whether the environment said so itself, so that trying again cannot help.
        missing: whether a package, the interpreter or data is missing here, which a pod may have.
    """

    def __init__(self, message: str, *, permanent: bool = False, missing: bool = False) -> None:
        super().__init__(message)
        self.permanent, self.missing = permanent, missing


@dataclass
class _Rollout:
    task: TaskRef
    model: ModelClient
    result: asyncio.Future[Played | list[Score]]
    """Scores: of a group that is compared."""
    members: int = 0
    """Episodes that are compared; 0: one is played."""
    asking: asyncio.Task[None] | None = None
    call: int = 0
    model_error: Exception | None = None


@dataclass
class Ready:
    """Self-description of a loaded environment."""

    id: str
    single_turn: bool
    compares: bool
    train: int
    eval: int
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about the data, for people."""
    digest: str = field(default="", compare=False)
    """Digest of the training tasks, see `distinct.check_distinct`; "" if the environment's release reports none."""


class Talk(ABC):
    """One connection to a loaded environment, from its start to its end. Everything happens in the event loop that made it.

    Args:
        id: the environment's id, for messages.
        number: counts the lives of the environment, from 1.
    """

    def __init__(self, id: str, number: int) -> None:
        self.id, self.number = id, number
        self.played = 0
        """Episodes that went well."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Death] = loop.create_future()
        """Done when nothing of it is left."""
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._wire = Lines(self._receive, self._lost)
        self._rollouts: dict[int, _Rollout] = {}
        self._given_up: dict[int, TaskRef] = {}
        """Rollouts that nobody waits for any more and that the process has not answered, oldest first."""
        self._changed = asyncio.Event()

    @abstractmethod
    async def start(self) -> Ready:
        """Load the environment.

        Raises:
            StartError: it cannot be loaded, ended, or took too long.
        """

    @abstractmethod
    def end(self) -> None:
        """End it and all it started, now; rollouts that it plays get no answer."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """`memory_gib` at most and `stall_seconds` of its event loop at most, so far."""

    @abstractmethod
    def _answered(self, document: Document) -> None:
        """Take the answer to a `ping`."""

    @abstractmethod
    def _lost(self, error: WireError | None) -> None: ...

    def _explained(self, message: str) -> str:
        """Message of the environment's error, with what this end knows about it."""
        return message

    async def until_idle(self) -> None:
        """Wait until no episode is played, or it has ended."""
        while self._rollouts and not self.ended.done():
            self._changed.clear()
            await self._changed.wait()

    @property
    def in_flight(self) -> int:
        """Episodes that are played."""
        return len(self._rollouts)

    def _bury(self, death: Death) -> None:
        """Give the end to all that wait for it."""
        culprit = self._rollouts.get(death.rollout)
        death = replace(death, task=culprit.task if culprit is not None else self._given_up.get(death.rollout))
        for number, rollout in list(self._rollouts.items()):
            if not rollout.result.done():
                bystander = death.task is not None and death.rollout != number
                message = f"its process {death.message}"
                error = self._error(death.kind, rollout.task, message, death=self.number, bystander=bystander)
                rollout.result.set_exception(error)
        if not self.ended.done():
            self.ended.set_result(death)

    # ---- episodes

    async def play(
        self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> Played:
        """Play one episode in the process; see `Stage.play`. Raises `EpisodeError`.

        Args:
            number: by which the process knows the rollout; 0: a new one.
        """
        rollout = _Rollout(task, model, asyncio.get_running_loop().create_future())
        played = await self._answer(rollout, {"op": "play"}, timeout_seconds, reward_seconds, number)
        assert isinstance(played, Played)  # see `_finished`
        return played

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> list[Score]:
        """Compare the episodes of a group in the process; see `Stage.compare`. Raises `EpisodeError`.

        Args:
            number: see `play`.
        """
        members = [
            {"messages": one.episode.messages, "replies": one.episode.replies, **_read_numbers(one.score)}
            for one in group
        ]
        rollout = _Rollout(task, _NoModel(), asyncio.get_running_loop().create_future(), len(members))
        scores = await self._answer(rollout, {"op": "compare"}, timeout_seconds, reward_seconds, number, members)
        assert isinstance(scores, list)  # see `_finished`
        return scores

    async def _answer(
        self,
        rollout: _Rollout,
        asked: Document,
        timeout_seconds: float,
        reward_seconds: float,
        number: int,
        members: Sequence[Document] = (),
    ) -> Played | list[Score]:
        """Have the process play or compare, and wait for what comes of it."""
        task = rollout.task
        number = number or secrets.randbelow(1 << 62) + 1  # no episode guesses that of another, to answer in its name
        deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
        document = {**asked, "rollout": number, "split": task.split, "index": task.index, **deadlines}
        self._rollouts[number] = rollout  # before anything is awaited: the process may end meanwhile
        try:
            line = await encode_list(document, "members", members) if members else encode_document(document)
            if len(line) > MAX_LINE_BYTES:
                message = (
                    f"the group's episodes have {len(line)} bytes as JSON (at most {MAX_LINE_BYTES}); make them shorter"
                )
                raise self._error("reward", task, message)
        except BaseException:
            del self._rollouts[number]
            self._changed.set()
            raise
        if not rollout.result.done():
            self._wire.send_line(line)
        try:
            async with asyncio.timeout(timeout_seconds + GRACE_SECONDS):
                return await rollout.result
        except TimeoutError as error:
            raise self._error(
                "timeout", task, f"the episode's {round(timeout_seconds, 3):g} seconds were over"
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

    def _error(
        self, kind: ErrorKind, task: TaskRef, message: str, *, death: int = 0, bystander: bool = False
    ) -> EpisodeError:
        return EpisodeError(kind, self.id, str(task), message, death=death, bystander=bystander)

    async def _ask(self, number: int, rollout: _Rollout, document: Document) -> None:
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

    def _receive(self, document: Document) -> None:
        try:
            self._handle(document)
        except WireError:
            raise
        except Exception as error:
            raise WireError(
                f"its message {clip_text(str(document['op']), 40)!r} is malformed ({describe_exception(error)})"
            ) from error

    def _handle(self, document: Document) -> None:
        if document["op"] == "pong":
            self._answered(document)
            return
        if document["op"] in ("ready", "unusable"):
            if not self._ready.done():
                self._loaded(document)
            return
        rollout = self._rollouts.get(int(document["rollout"]))
        if rollout is None or rollout.result.done():
            if document["op"] in ("played", "compared", "failed"):
                self._given_up.pop(int(document["rollout"]), None)
            return
        match document["op"]:
            case "complete":
                if rollout.asking is not None:
                    rollout.asking.cancel()  # one call at a time
                rollout.call = int(document["call"])
                rollout.asking = asyncio.ensure_future(self._ask(int(document["rollout"]), rollout, document))
            case "abandon":
                if rollout.asking is not None and rollout.call == document["call"]:
                    rollout.asking.cancel()
            case "played" | "compared":
                self._finished(rollout, document)
            case "failed":
                if (kind := document["kind"]) not in get_args(ErrorKind):
                    raise WireError(f"{clip_text(str(kind), 40)!r} is no kind of error")
                task_id, message = (
                    clip_text(str(document["task_id"])),
                    self._explained(clip_text(str(document["message"]))),
                )
                error = EpisodeError(kind, self.id, task_id, message)
                if error.kind == "model":
                    error.__cause__ = rollout.model_error
                rollout.result.set_exception(error)
            case unknown:
                raise WireError(f"{unknown!r} is none of its messages")

    def _finished(self, rollout: _Rollout, document: Document) -> None:
        if (document["op"] == "compared") != (rollout.members > 0):
            raise WireError(f"{document['op']!r} does not answer what was asked")
        try:
            rollout.result.set_result(
                _read_compared(document, rollout.members) if rollout.members else _read_played(document)
            )
            self.played += 1
        except BoundsError as refused:
            rollout.result.set_exception(self._error("reward", rollout.task, str(refused)))

    def _loaded(self, document: Document) -> None:
        if document["op"] == "unusable":
            self._ready.set_exception(
                StartError(self._explained(document["message"]), permanent=True, missing=bool(document.get("missing")))
            )
            return
        kind = bool(document["single_turn"]), bool(document["compares"])
        sizes = int(document["train"]), int(document["eval"])
        notices = tuple(clip_text(str(notice)) for notice in list(document.get("notices", ()))[:MAX_NOTICES])
        digest = clip_text(str(dict(document.get("digests", {})).get("train", "")), MAX_NAME_CHARACTERS)
        self._ready.set_result(Ready(str(document["id"]), *kind, *sizes, notices, digest))


class _NoModel:
    """The model of a comparison: it has none."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        raise RuntimeError("a comparison asks the policy nothing")


def _read_numbers(score: Score) -> Document:
    return {"reward": score.reward, "metrics": score.metrics}


def _read_compared(document: Document, members: int) -> list[Score]:
    rewards, metrics = list(document["rewards"]), list(document["metrics"])
    if len(rewards) != members or len(metrics) != members:
        raise WireError(f"it gave {len(rewards)} rewards to {members} episodes")
    return [plain_score(Score(reward, of_one)) for reward, of_one in zip(rewards, metrics, strict=True)]


def _read_played(document: Document) -> Played:
    episode = Episode(list(document["messages"]), int(document["replies"]), dict(document["info"]))
    score = plain_score(Score(document["reward"], document["metrics"]))
    return Played(str(document["task_id"]), episode, score)
