"""What the orchestrator and an environment say to each other, seen from the orchestrator, wherever the environment runs."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, cast

from rlrun.environments.episode import EpisodeError, ErrorKind
from rlrun.environments.process.wire import Document, Lines, WireError
from rlrun.environments.protocol import Episode, ModelClient, Score
from rlrun.environments.stage import Played, TaskRef

GRACE_SECONDS = 10.0
"""The environment ends an episode at its deadline; this much later it is given up from here."""
DeathKind = Literal["crash", "hang", "memory"]


@dataclass(frozen=True)
class Death:
    """Why a process ended."""

    kind: DeathKind
    message: str


class StartError(Exception):
    """The process did not become ready.

    Args:
        message: why.
        permanent: whether the environment said so itself, so that trying again cannot help.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass
class _Rollout:
    task: TaskRef
    model: ModelClient
    result: asyncio.Future[Played]
    asking: asyncio.Task[None] | None = None
    call: int = 0
    model_error: Exception | None = None


@dataclass
class Ready:
    """What a loaded environment says of itself."""

    id: str
    single_turn: bool
    train: int
    eval: int


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
        self._numbers = itertools.count(1)

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
        """A `ping` was answered."""

    @abstractmethod
    def _lost(self, error: WireError | None) -> None: ...

    def _bury(self, death: Death) -> None:
        """Tell everybody who waits."""
        for rollout in list(self._rollouts.values()):
            if not rollout.result.done():
                error = self._error(death.kind, rollout.task, f"its process {death.message}", self.number)
                rollout.result.set_exception(error)
        if not self.ended.done():
            self.ended.set_result(death)

    # ---- episodes

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode in the process; see `Stage.play`. Raises `EpisodeError`."""
        number = next(self._numbers)
        rollout = _Rollout(task, model, asyncio.get_running_loop().create_future())
        self._rollouts[number] = rollout
        deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
        self._wire.send({"op": "play", "rollout": number, "split": task.split, "index": task.index, **deadlines})
        try:
            async with asyncio.timeout(timeout_seconds + GRACE_SECONDS):
                return await rollout.result
        except TimeoutError as error:
            raise self._error("timeout", task, f"the episode's {timeout_seconds:g} seconds were over") from error
        finally:
            del self._rollouts[number]
            if rollout.asking is not None:
                rollout.asking.cancel()
            if not rollout.result.done() or rollout.result.cancelled():
                self._wire.send({"op": "cancel", "rollout": number})

    def _error(self, kind: ErrorKind, task: TaskRef, message: str, death: int = 0) -> EpisodeError:
        return EpisodeError(kind, self.id, str(task), message, death=death)

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

    # ---- what the process says

    def _receive(self, document: Document) -> None:
        try:
            self._handle(document)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"its message {document.get('op')!r} is malformed ({error})") from error

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
            return  # it was given up meanwhile
        match document["op"]:
            case "complete":
                rollout.call = int(document["call"])
                rollout.asking = asyncio.ensure_future(self._ask(int(document["rollout"]), rollout, document))
            case "abandon":
                if rollout.asking is not None and rollout.call == document["call"]:
                    rollout.asking.cancel()
            case "played":
                self.played += 1
                rollout.result.set_result(_played(document))
            case "failed":
                error = EpisodeError(
                    cast(ErrorKind, str(document["kind"])), self.id, document["task_id"], document["message"]
                )
                if error.kind == "model":
                    error.__cause__ = rollout.model_error
                rollout.result.set_exception(error)
            case unknown:
                raise WireError(f"{unknown!r} is none of its messages")

    def _loaded(self, document: Document) -> None:
        if document["op"] == "unusable":
            self._ready.set_exception(StartError(document["message"], permanent=True))
            return
        sizes = int(document["train"]), int(document["eval"])
        self._ready.set_result(Ready(str(document["id"]), bool(document["single_turn"]), *sizes))


def _played(document: Document) -> Played:
    episode = Episode(list(document["messages"]), int(document["replies"]), dict(document["info"]))
    score = Score(float(document["reward"]), {str(k): float(v) for k, v in document["metrics"].items()})
    return Played(str(document["task_id"]), episode, score)
