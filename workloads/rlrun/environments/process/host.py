"""First process of an environment's own container: starts the environment for each client as the orchestrator would itself.

Its image needs a Python with pydantic and the environment's packages. The code of this package comes from the orchestrator's image,
through a volume of the pod (`bootstrap`). Each connection is one life of one environment: the first document loads it, the end of the
connection ends it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.log import Log
from rlrun.environments.process.talk import Ready, StartError
from rlrun.environments.process.variables import EVERYTHING
from rlrun.environments.process.wire import Document, Lines, WireError
from rlrun.environments.process.worker import RemoteModel, Worker
from rlrun.environments.protocol import ModelClient, Score, Split
from rlrun.environments.stage import Played, Stage, TaskRef, TaskRefs
from rlrun.runtime.processes import refuse_inspection

SOCKET_MODE = 0o660
"""Mode of the socket: the orchestrator is another user of the same group, and to connect it needs the right to write."""


class _LifeStage:
    """One life as a `Stage`; nothing is started again here: the orchestrator connects again.

    Attributes:
        told: set once the life's end was reported to the orchestrator. Before any rollout's end by it: a rollout that is sent in between
            would be lost with a process that had ended already.
    """

    def __init__(self, life: Life, ready: Ready) -> None:
        self._life, self.id, self.single_turn, self.compares = life, ready.id, ready.single_turn, ready.compares
        self._sizes: dict[Split, int] = {"train": ready.train, "eval": ready.eval}
        self.told = asyncio.Event()

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        return TaskRefs(split, self._sizes[split])

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        try:
            deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
            # One number on both ways: the orchestrator knows by it whose code ran when the process ended.
            number = model.rollout if isinstance(model, RemoteModel) else 0
            return await self._life.play(task, model, **deadlines, number=number)
        except EpisodeError as error:
            if error.death:
                await self.told.wait()
            raise

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> list[Score]:
        try:
            deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
            return await self._life.compare(task, group, **deadlines, number=number)
        except EpisodeError as error:
            if error.death:
                await self.told.wait()
            raise

    def metrics(self) -> dict[str, float]:
        return self._life.metrics()


class _Guest(Worker):
    """One connection."""

    def __init__(self) -> None:
        super().__init__()
        self._life: Life | None = None
        self._loading: asyncio.Task[None] | None = None

    def _lost(self, error: WireError | None) -> None:
        self.end()

    def end(self) -> None:
        """End the environment, should it have begun."""
        if self._loading is not None:
            self._loading.cancel()
        for playing in self._playing.values():
            if playing.task is not None:
                playing.cancelled = True
                playing.task.cancel()
        if self._life is not None:
            self._life.end()

    async def _compare(
        self, stage: Stage, number: int, task: TaskRef, group: Sequence[Played], deadlines: Mapping[str, float]
    ) -> list[Score]:
        assert isinstance(stage, _LifeStage)
        return await stage.compare(task, group, **deadlines, number=number)  # of both ways, as in `play`

    def _begin(self, document: Document) -> None:
        self._loading = asyncio.get_running_loop().create_task(self._load_apart(document))

    def _pong(self, document: Document) -> Document:
        metrics = self._life.metrics() if self._life is not None else {}
        return {"op": "pong", "number": document["number"], "metrics": metrics}

    async def _load_apart(self, document: Document) -> None:
        # All variables and all files are those of the environment's own image.
        command = Command(document["id"], document["args"], document["python"], variables=(EVERYTHING,), is_alone=True)
        self._life = life = Life(command, Limits(**document["limits"]), Log(None))
        try:
            ready = await life.start()
        except StartError as error:
            if error.permanent:
                self.wire.send({"op": "unusable", "message": str(error)})
            else:
                self.wire.send({"op": "died", "kind": "crash", "message": f"did not load: {error}"})
            return
        stage = _LifeStage(life, ready)
        self._stage = stage
        self.wire.send({"op": "ready", **vars(ready)})
        death = await life.ended
        self.wire.send({"op": "died", "kind": death.kind, "message": death.message, "rollout": death.rollout})
        stage.told.set()


async def serve(socket: Path, stopped: asyncio.Event) -> None:
    """Serve connections at `socket`, which does not exist, until `stopped`; then end all that they began."""
    guests: set[_Guest] = set()

    def connected() -> Lines:
        guest = _Guest()
        guests.add(guest)
        return guest.wire

    server = await asyncio.get_running_loop().create_unix_server(connected, str(socket))
    await asyncio.to_thread(socket.chmod, SOCKET_MODE)
    await stopped.wait()
    server.close()
    for guest in guests:
        guest.wire.close()
        guest.end()


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM.

    Args:
        argv: path of the socket.
    """
    refuse_inspection()
    socket = Path(argv[0])
    Path.home().mkdir(parents=True, exist_ok=True)  # of its own, on the pod's volume: the root file system is read-only
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)  # of the container's life before

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await serve(socket, stopped)

    asyncio.run(run())
