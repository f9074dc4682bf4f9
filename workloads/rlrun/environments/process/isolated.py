"""Environment in its own processes or containers, each of which is restarted when it ends.

`Remote` is the connection to an environment in another container. The host of that container starts, monitors and ends the environment's
process, like `life` for a process of this container. When the container ends, the connection ends, too. A new connection works after the
kubelet has restarted the container.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from fcntl import F_SETPIPE_SZ, fcntl
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.life import PING_LOOKS, Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.supervised import MAX_BACKOFF_SECONDS, Record, Supervised, first_of, log_hint
from rlrun.environments.process.talk import Death, Ready, StartError, Talk
from rlrun.environments.process.wire import Document, WireError
from rlrun.environments.protocol import ModelClient, Score, Split
from rlrun.environments.stage import Played, TaskRef, TaskRefs
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

KNOCK_SECONDS = 0.5
"""Time between two attempts to connect to the host."""
LOAD_MARGIN_SECONDS = 5.0
"""Time that the host has, after its own deadline for loading an environment, to report the failure."""
LOG_BYTES = 1024 * 1024
"""Limit of output that waits to be written to the log. More output is dropped, because the event loop must not wait for a disk."""


class Remote(Talk):
    """One connection.

    Args:
        socket: socket of the host.
        command: environment to start.
        limits: resource limits of the environment.
        log: log for the environment's output.
        number: number of this life; see `Talk`.
    """

    def __init__(self, socket: Path, command: Command, limits: Limits, log: Log, number: int = 1) -> None:
        super().__init__(command.id, number)
        self._socket, self._command, self._limits, self._log = socket, command, limits, log
        self._log_pipe = -1
        """Pipe to the thread that writes the log, or -1 if it is closed."""
        self._metrics = {"memory_gib": 0.0, "stall_seconds": 0.0}
        self._pings = itertools.count(1)
        self._pinging: asyncio.Task[None] | None = None
        self._answered_at = 0.0
        """Time of the last answer to a ping, on the event loop's clock."""

    async def start(self) -> Ready:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.start_seconds
        # The kubelet may still be starting the container, so the connection is retried until the deadline.
        while True:
            try:
                _check_socket(self._socket)
                await loop.create_unix_connection(lambda: self._wire, str(self._socket))
                break
            except OSError as error:
                if loop.time() >= deadline:
                    reason = f"no container answered at {self._socket} within {self._limits.start_seconds:g} seconds"
                    raise StartError(f"{reason} ({error.strerror})") from error
            await asyncio.sleep(KNOCK_SECONDS)
        self._open_log()
        asked = {"id": self._command.id, "args": dict(self._command.args), "limits": asdict(self._limits)}
        if self._command.given is not None:
            asked |= {"variables": dict(self._command.given), "withheld": sorted(self._command.withheld)}
        self._wire.send({"op": "load", "python": self._command.python, **asked})
        # Wait for the answer a little longer than the host itself does, so that the host's own reason is reported.
        waiting: set[asyncio.Future[Ready] | asyncio.Future[Death]] = {self._ready, self.ended}
        limit = self._limits.start_seconds + LOAD_MARGIN_SECONDS
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self._pinging = loop.create_task(self._ping_host())
            return self._ready.result()
        self.end()
        if self.ended.done():
            raise StartError(f"its process {self.ended.result().message} while loading")
        raise StartError(f"it did not load within {self._limits.start_seconds:g} seconds")

    def end(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        self._wire.close()  # the host then ends the environment
        self._close_log()

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    async def _ping_host(self) -> None:
        """Ping the host until canceled. A host that does not answer for `hang_seconds` counts as dead."""
        loop = asyncio.get_running_loop()
        self._answered_at = loop.time()
        looks = 0
        while True:
            # This process itself may be delayed, so the host has to miss several pings before its silence counts.
            self._wire.send({"op": "ping", "number": next(self._pings)})
            heard = self._answered_at
            await asyncio.sleep(self._limits.look_seconds)
            looks = 0 if self._answered_at != heard or self._wire.busy else looks + 1
            silent = loop.time() - self._answered_at
            if looks >= PING_LOOKS and silent > self._limits.hang_seconds:
                self._report_end(
                    Death("hang", f"was in a container whose first process did not answer for {silent:.1f} s")
                )
                self.end()

    def _handle_pong(self, document: Document) -> None:
        self._answered_at = asyncio.get_running_loop().time()
        self._metrics = {name: float(document["metrics"][name]) for name in self._metrics}

    def _open_log(self) -> None:
        reading, self._log_pipe = os.pipe()
        with suppress(OSError):  # above the user's limit, the pipe keeps its default size
            fcntl(self._log_pipe, F_SETPIPE_SZ, LOG_BYTES)
        os.set_blocking(self._log_pipe, False)
        self._log.follow(reading)

    def _close_log(self) -> None:
        if self._log_pipe >= 0:
            os.close(self._log_pipe)
            self._log_pipe = -1

    def _write_output(self, text: str) -> None:
        """Write output of the environment, one byte per character, to its log."""
        if self._log_pipe >= 0:
            with suppress(BlockingIOError):
                os.write(self._log_pipe, text.encode("latin-1"))

    def _handle_message(self, document: Document) -> None:
        if document["op"] == "log":
            self._write_output(str(document["text"]))
            return
        if document["op"] == "died":
            self._report_end(Death(document["kind"], str(document["message"]), int(document.get("rollout", 0))))
            self.end()
            return
        super()._handle_message(document)

    def _on_connection_lost(self, error: WireError | None) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        why = "was in a container that ended" if error is None else f"broke the protocol ({error})"
        if not self._ready.done():
            why += ", or refused the connection"
        self._report_end(Death("crash", why))
        self._close_log()


def _check_socket(path: Path) -> None:
    """Reject a link: the container that owns the folder could redirect the orchestrator to the socket of another container.

    Raises:
        OSError: the path does not exist, or is not a socket.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))


class IsolatedEnvironment:
    """`Stage` whose code runs in separate processes.

    Args:
        label: name of the environment in messages.
        command: environment to start.
        limits: resource limits of each process.
        logs: log of each process; their number is the number of processes.
        host: socket of the container that starts the processes (see `host`). None: start them in this container.
    """

    def __init__(
        self, label: str, command: Command, limits: Limits, logs: Sequence[Log], host: Path | None = None
    ) -> None:
        self._label, self._command, self._limits, self._host = label, command, limits, host
        self._record = Record(label)
        self._any_up = asyncio.Event()
        self._ready: Ready | None = None
        self.workers = [
            Supervised(self._record, log, partial(self._new_life, log), self._update_any_up) for log in logs
        ]

    @property
    def id(self) -> str:
        return self._ready.id if self._ready else self._command.id

    @property
    def single_turn(self) -> bool:
        return self._ready is not None and self._ready.single_turn

    @property
    def compares(self) -> bool:
        return self._ready is not None and self._ready.compares

    @property
    def digest(self) -> str:
        """Digest of the training tasks, or "" before `start`."""
        return self._ready.digest if self._ready else ""

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        if self._ready is None:
            return TaskRefs(split, 0)
        return TaskRefs(split, self._ready.train if split == "train" else self._ready.eval)

    async def start(self) -> None:
        """Start the processes and load the environment in each.

        Raises:
            RoleError: the environment cannot be loaded.
        """
        found = await asyncio.gather(*(self._start_worker(worker) for worker in self.workers), return_exceptions=True)
        for ready in found:
            if isinstance(ready, BaseException):
                raise ready
            self._ready = self._ready or ready
            self._check_same(ready)
        for notice in self._ready.notices if self._ready is not None else ():
            logger.warning(f"environment {self._label!r}: {notice}")

    async def _start_worker(self, worker: Supervised) -> Ready:
        try:
            return await worker.start()
        except StartError as error:
            code = exit_codes.CONFIGURATION if error.permanent else exit_codes.FAILURE
            message = str(error) if error.permanent else f"environment {self._label!r}: {error}{log_hint(worker.log)}"
            raise RoleError(message, code) from error

    async def run(self) -> None:
        """Restart each process whenever it ends, with growing pauses. Call after `start`; runs until canceled.

        Raises:
            RoleError: the processes end too often without one successful rollout, or an environment has other tasks after a restart.
        """
        running = [asyncio.create_task(worker.run(self._check_same)) for worker in self.workers]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode in the process with the fewest episodes. If no process is up, wait for one. See `Stage.play`.

        The deadline is extended while processes restart because of other rollouts. If a process ended because of this task before, the
        task first waits until rollouts of other tasks succeed, for at most half of its time. Otherwise it would end each new process
        together with the rollouts that are repeated there.
        """
        deadline = time.monotonic() + timeout_seconds
        if task not in self._record.accused:
            with self._record.count_innocent():
                return await self._play_on_worker(task, model, deadline, reward_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds / 2):
                while not self._record.clear.is_set():  # the event may have been cleared again before this task runs
                    await self._record.clear.wait()
        return await self._play_on_worker(task, model, deadline, reward_seconds)

    async def _play_on_worker(
        self, task: TaskRef, model: ModelClient, deadline: float, reward_seconds: float
    ) -> Played:
        worker, left = await self._wait_for_worker(task, deadline)
        return await worker.play(task, model, timeout_seconds=left, reward_seconds=reward_seconds)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        worker, left = await self._wait_for_worker(task, time.monotonic() + timeout_seconds)
        return await worker.compare(task, group, timeout_seconds=left, reward_seconds=reward_seconds)

    async def _wait_for_worker(self, task: TaskRef, deadline: float) -> tuple[Supervised, float]:
        """Return a process that is up, and the seconds that remain for the task.

        A task that did not cause the restart loses no time by it, up to the longest duration of one restart.

        Raises:
            EpisodeError: no process restarted in time.
        """
        began = time.monotonic()
        # A task that ended a process before gets no extra time, because it may have caused the current restart as well.
        pause = 0.0 if task in self._record.accused else self._limits.start_seconds + MAX_BACKOFF_SECONDS
        try:
            worker = await first_of(self.workers, self._any_up, deadline + pause)
        except TimeoutError as error:
            message = f"its process did not restart within {deadline + pause - began:.3g} seconds"
            raise EpisodeError("timeout", self.id, str(task), message) from error
        now = time.monotonic()
        # The time of the wait is given back to the task, up to `pause`.
        return worker, max(0.0, deadline + min(pause, now - began) - now)

    def metrics(self) -> dict[str, float]:
        """Return `restarts` of all processes, and of the current ones the highest memory and the longest time for which one call blocked
        an event loop."""
        each = [worker.life.metrics() for worker in self.workers]
        highest = {name: max(metrics[name] for metrics in each) for name in each[0]}
        return {"restarts": float(self._record.restarts), **highest}

    def close(self) -> None:
        """End the processes and all their children."""
        for worker in self.workers:
            worker.close()

    def _update_any_up(self) -> None:
        if any(worker.up for worker in self.workers):
            self._any_up.set()
        else:
            self._any_up.clear()

    def _new_life(self, log: Log, number: int) -> Talk:
        if self._host is None:
            return Life(self._command, self._limits, log, number)
        return Remote(self._host, self._command, self._limits, log, number)

    def _check_same(self, ready: Ready) -> None:
        if ready != self._ready:
            raise RoleError(
                f"environment {self._label!r}: after a restart it has other tasks than before ({ready} instead of {self._ready}); "
                "tasks must be the same in every process, so do not create them with a clock or hash()",
                exit_codes.DATA,
            )
