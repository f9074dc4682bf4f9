"""First process of an environment container. It starts an environment for each connection of the orchestrator.

Each connection is one life of one environment: the first document loads it, and the end of the connection ends it. There are two kinds of
containers:

- An environment with an image has its own container. The image needs a Python with pydantic and the environment's packages. The code of
  this package comes from the orchestrator's image, through a volume of the pod (`bootstrap`).
- All other environments share one container with the orchestrator's image. As in the orchestrator's container, each environment is isolated
  from the others (`containment`). It gets its variables from the orchestrator. It cannot connect to this process to start another
  environment that is not isolated.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket as sockets
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.containment.signal_guard import ancestor_pids
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import EVERYTHING, Log
from rlrun.environments.process.talk import Ready, StartError
from rlrun.environments.process.wire import Document, Lines, WireError
from rlrun.environments.process.worker import RemoteModel, Worker
from rlrun.environments.protocol import ModelClient, Score, Split
from rlrun.environments.stage import Played, Stage, TaskRef, TaskRefs
from rlrun.runtime.processes import refuse_inspection

SOCKET_MODE = 0o660
"""Mode of the socket. The orchestrator runs as another user of the same group, and a connection needs write permission."""
LOG_BYTES = 1024 * 1024
"""Limit of an environment's unsent output. More output is dropped, so that a print in a loop does not fill this process's memory."""


class _SentLog(Log):
    """Log that sends an environment's output to the orchestrator, which writes the log file."""

    def __init__(self, wire: Lines) -> None:
        super().__init__(None)
        self._wire, self._loop = wire, asyncio.get_running_loop()
        self._pending = self._dropped = 0
        """Bytes that wait for the event loop, and bytes that were dropped."""
        self._counting = threading.Lock()

    def _store_output(self, chunk: bytes) -> None:
        super()._store_output(chunk)
        with self._counting:
            if self._pending + self._wire.unsent_bytes > LOG_BYTES:
                self._dropped += len(chunk)
                return
            self._pending += len(chunk)
        with suppress(RuntimeError):  # the event loop has ended already
            self._loop.call_soon_threadsafe(self._send_chunk, chunk)

    def _send_chunk(self, chunk: bytes) -> None:
        with self._counting:
            self._pending -= len(chunk)
            dropped, self._dropped = self._dropped, 0
        note = f"[{dropped} bytes of output were dropped]\n" if dropped else ""
        # latin-1 encodes each byte as one character, because a chunk may end in the middle of a UTF-8 character.
        self._wire.send({"op": "log", "text": note + chunk.decode("latin-1")})


class _OutsideOnly(asyncio.Protocol):
    """Protocol that accepts connections only from other containers.

    Otherwise an environment in the shared container could make this process start another environment with limits of its choice.

    Args:
        accept_connection: function that returns the protocol of an accepted connection. It is not called for rejected connections.
    """

    def __init__(self, accept_connection: Callable[[], asyncio.Protocol]) -> None:
        self._accept = accept_connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        pid, _, _ = struct.unpack("3i", peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i")))
        if _started_here(pid):
            transport.abort()
            return
        accepted = self._accept()
        transport.set_protocol(accepted)
        accepted.connection_made(transport)


def _started_here(pid: int) -> bool:
    """Return whether a process is a descendant of this one, or has ended.

    Args:
        pid: pid of the connected process; 0 for processes of other containers, which are not visible in this pid namespace.
    """
    return pid != 0 and (os.getpid() in ancestor_pids(pid) or not Path("/proc", str(pid)).exists())


class _LifeStage:
    """One life as a `Stage`. It does not restart the environment: the orchestrator connects again.

    Attributes:
        end_reported: event that is set after the end of the life was reported to the orchestrator. Failures of its rollouts are sent only
            afterwards: otherwise the orchestrator could send a new rollout to the ended process, where it would be lost.
    """

    def __init__(self, life: Life, ready: Ready) -> None:
        self._life, self.id, self.single_turn, self.compares = life, ready.id, ready.single_turn, ready.compares
        self._sizes: dict[Split, int] = {"train": ready.train, "eval": ready.eval}
        self.end_reported = asyncio.Event()

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        return TaskRefs(split, self._sizes[split])

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        try:
            deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
            # Both connections use one number, by which the orchestrator finds the rollout whose code ran when the process ended.
            number = model.rollout if isinstance(model, RemoteModel) else 0
            return await self._life.play(task, model, **deadlines, number=number)
        except EpisodeError as error:
            if error.death:
                await self.end_reported.wait()
            raise

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> list[Score]:
        try:
            deadlines = {"timeout_seconds": timeout_seconds, "reward_seconds": reward_seconds}
            return await self._life.compare(task, group, **deadlines, number=number)
        except EpisodeError as error:
            if error.death:
                await self.end_reported.wait()
            raise

    def metrics(self) -> dict[str, float]:
        return self._life.metrics()


class _Guest(Worker):
    """One connection.

    Args:
        is_shared: whether other environments run in this container.
        on_lost: function that is called with this guest after the end of its connection.
    """

    def __init__(self, *, is_shared: bool, on_lost: Callable[[_Guest], None]) -> None:
        super().__init__()
        self._is_shared, self._on_lost = is_shared, on_lost
        self._life: Life | None = None
        self._loading: asyncio.Task[None] | None = None

    def _on_connection_lost(self, error: WireError | None) -> None:
        self.end()
        self._on_lost(self)

    def end(self) -> None:
        """End the environment if it was started."""
        if self._loading is not None:
            self._loading.cancel()
        for playing in self._playing.values():
            if playing.task is not None:
                playing.cancelled = True
                playing.task.cancel()
        if self._life is not None:
            self._life.end()

    async def _compare_group(
        self, stage: Stage, number: int, task: TaskRef, group: Sequence[Played], deadlines: Mapping[str, float]
    ) -> list[Score]:
        assert isinstance(stage, _LifeStage)
        return await stage.compare(
            task, group, **deadlines, number=number
        )  # one number for both connections, as in `play`

    def _handle_load(self, document: Document) -> None:
        self._loading = asyncio.get_running_loop().create_task(self._load_apart(document))

    def _make_pong(self, document: Document) -> Document:
        metrics = self._life.metrics() if self._life is not None else {}
        return {"op": "pong", "number": document["number"], "metrics": metrics}

    def _make_command(self, document: Document) -> Command:
        what = document["id"], document["args"], document["python"]
        if not self._is_shared:
            # All variables and files of this container belong to the environment's own image.
            return Command(*what, variables=(EVERYTHING,), is_alone=True)
        # The orchestrator has selected the variables. This container has no secret in its own variables.
        given, withheld = dict(document["variables"]), frozenset(document["withheld"])
        return Command(*what, variables=(EVERYTHING,), given=given, withheld=withheld)

    async def _load_apart(self, document: Document) -> None:
        self._life = life = Life(self._make_command(document), Limits(**document["limits"]), _SentLog(self.wire))
        try:
            ready = await life.start()
        except StartError as error:
            if error.permanent:
                self.wire.send({"op": "unusable", "message": str(error), "missing": error.missing})
            else:
                self.wire.send({"op": "died", "kind": "crash", "message": f"did not load: {error}"})
            return
        stage = _LifeStage(life, ready)
        self._stage = stage
        self.wire.send({"op": "ready", **vars(ready), "digests": {"train": ready.digest}})
        death = await life.ended
        self.wire.send({"op": "died", "kind": death.kind, "message": death.message, "rollout": death.rollout})
        stage.end_reported.set()


async def serve_connections(socket: Path, stopped: asyncio.Event, *, is_shared: bool = False) -> None:
    """Serve connections at `socket` until `stopped` is set, then end all environments.

    Args:
        socket: path of the socket, which must not exist.
        stopped: event that ends the service.
        is_shared: whether several isolated environments run in this container.
    """
    guests: set[_Guest] = set()
    """Guests with an open connection. Closed ones are removed, because a run of weeks restarts its environments many times."""

    def accept_connection() -> asyncio.Protocol:
        guest = _Guest(is_shared=is_shared, on_lost=guests.discard)
        guests.add(guest)
        return guest.wire

    connected = partial(_OutsideOnly, accept_connection) if is_shared else accept_connection
    server = await asyncio.get_running_loop().create_unix_server(connected, str(socket))
    await asyncio.to_thread(socket.chmod, SOCKET_MODE)
    await stopped.wait()
    server.close()
    for guest in tuple(guests):
        guest.wire.close()
        guest.end()


def _prepare_socket(socket: Path) -> None:
    refuse_inspection()
    Path.home().mkdir(parents=True, exist_ok=True)  # on the pod's volume, because the root file system is read-only
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)  # left over from the container's previous start


def main(argv: Sequence[str]) -> None:
    """Serve one environment that has its own container, until SIGTERM.

    Args:
        argv: path of the socket.
    """
    socket = Path(argv[0])
    _prepare_socket(socket)

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await serve_connections(socket, stopped)

    asyncio.run(run())


def serve_shared(socket: Path, ending: int) -> None:
    """Serve the environments of a shared container until the container ends.

    Args:
        socket: path of the socket.
        ending: descriptor that becomes readable after a signal. The signal handlers are installed already.
    """
    _prepare_socket(socket)

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(ending, stopped.set)
        await serve_connections(socket, stopped, is_shared=True)

    asyncio.run(run())
