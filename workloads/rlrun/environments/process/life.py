"""One life of an environment's process, from its start to its end, seen from the orchestrator."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlrun.environments.process import worker
from rlrun.environments.process.kill import MARK_VARIABLE, kill_all, usage
from rlrun.environments.process.log import Log
from rlrun.environments.process.talk import Death, DeathKind, Ready, StartError, Talk
from rlrun.environments.process.wire import Document, WireError
from rlrun.protocol.bootstrap import python_command

MAX_PROCESSES = 256
"""More processes than this are taken for a fork bomb."""
SECRETS = ("RLRUN_API_KEY",)
"""Environment variables that are none of an environment's business."""
CLOSE_SECONDS = 5.0
"""Between the end of the connection and that of the process."""


@dataclass(frozen=True)
class Limits:
    """What one environment's process may take."""

    start_seconds: float = 300.0
    """Until it has loaded its tasks."""
    memory_bytes: int = 8 * 1024**3
    """Resident memory of all its processes together."""
    hang_seconds: float = 60.0
    """For which its event loop may stand still."""
    look_seconds: float = 1.0
    """Between two looks at memory and event loop."""


@dataclass(frozen=True)
class Command:
    """What to start.

    Args:
        id: the environment's id.
        args: its arguments.
        python: the interpreter; None: this one.
    """

    id: str
    args: Mapping[str, Any]
    python: str | None = None


class Life(Talk):
    """A process that is started once. Everything happens in the event loop that made it.

    Args:
        command: what to start.
        limits: what it may take.
        log: gets what it prints.
        number: counts the lives of the environment, from 1.
    """

    def __init__(self, command: Command, limits: Limits, log: Log, number: int = 1) -> None:
        super().__init__(command.id, number)
        self.command, self.limits, self.log = command, limits, log
        self.peak_memory_bytes = 0
        self.worst_lag_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._mark = uuid.uuid4().hex
        self._verdict: Death | None = None
        self._pings, self._pong = itertools.count(1), 0
        self._watching: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._burying: asyncio.Task[None] | None = None

    async def start(self) -> Ready:
        """Start the process and load the environment.

        Raises:
            StartError: it cannot be loaded, ended, or took too long.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._process = self._spawn(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._exited)
        try:
            await loop.create_unix_connection(lambda: self._wire, sock=ours)
            self._wire.send({"op": "load", "id": self.command.id, "args": dict(self.command.args)})
            waiting: set[asyncio.Future[Any]] = {self._ready, self.ended}
            await asyncio.wait(waiting, timeout=self.limits.start_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                ready = self._ready.result()
            elif self.ended.done():
                raise StartError(f"its process {self.ended.result().message} while it loaded")
            else:
                raise StartError(
                    f"it did not load within {self.limits.start_seconds:g} seconds{await asyncio.to_thread(self._stacks)}"
                )
        except BaseException:
            self.end()
            raise
        self._watching = loop.create_task(self._watch())
        return ready

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        arguments = [str(descriptor), str(os.getpid()), str(self.limits.memory_bytes)]
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                python_command(worker.__name__, arguments, python=self.command.python),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[descriptor],
                env=environment | {MARK_VARIABLE: self._mark, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as error:
            os.close(reading)
            raise StartError(f"cannot start {self.command.python}: {error.strerror}", permanent=True) from error
        finally:
            os.close(writing)
        self._reader = self.log.follow(reading)
        return process

    def metrics(self) -> dict[str, float]:
        return {"memory_gib": self.peak_memory_bytes / 1024**3, "stall_seconds": self.worst_lag_seconds}

    def _answered(self, document: Document) -> None:
        self._pong = max(self._pong, int(document["number"]))

    def _lost(self, error: WireError | None) -> None:
        if error is not None:
            self._kill("crash", f"broke the protocol ({error}), perhaps by writing to a descriptor that is not its own")
            return
        # Either it is about to exit, and its exit code says more, or it has closed what it cannot open again.
        message = "closed its connection, which only it itself can have done"
        self._closing = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._kill, "crash", message)

    # ---- its end

    async def _watch(self) -> None:
        asked: dict[int, float] = {}
        while True:
            number = next(self._pings)
            asked[number] = time.monotonic()
            self._wire.send({"op": "ping", "number": number})
            await asyncio.sleep(self.limits.look_seconds)
            taken = await asyncio.to_thread(usage, self.pid, self.limits.memory_bytes)
            self.peak_memory_bytes = max(self.peak_memory_bytes, taken.memory_bytes)
            now = time.monotonic()
            asked = {ping: since for ping, since in asked.items() if ping > self._pong}
            silent = max((now - since for since in asked.values()), default=0.0)
            self.worst_lag_seconds = max(self.worst_lag_seconds, silent)
            if taken.memory_bytes > self.limits.memory_bytes:
                self._kill(
                    "memory",
                    f"used {_gib(taken.memory_bytes)}, more than memoryGib allows ({_gib(self.limits.memory_bytes)})",
                )
            elif taken.processes > MAX_PROCESSES:
                self._kill(
                    "crash", f"was ended because it ran {taken.processes} processes (the limit is {MAX_PROCESSES})"
                )
            elif silent > self.limits.hang_seconds:
                message = f"did not answer for {silent:.1f} s: something in it computes or waits without awaiting"
                self._kill("hang", message + await asyncio.to_thread(self._stacks))

    def _stacks(self) -> str:
        """Where the process is in its code, as it writes it into its log when asked; "" when it cannot."""
        self._signal(worker.STACKS)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if at := self._current_frame():
                return f"; it is at {at}"
        return ""

    def _current_frame(self) -> str | None:
        """The innermost line of the last stack in the log."""
        lines = self.log.last_lines(200)
        stacks = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
        return lines[stacks[-1] + 1] if stacks and len(lines) > stacks[-1] + 1 else None

    def _signal(self, number: signal.Signals) -> None:
        # Not `Popen.send_signal`: that may collect the process, see `kill_all`.
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _kill(self, kind: DeathKind, message: str) -> None:
        if self._verdict is None:
            self._verdict = Death(kind, message)
        self._signal(signal.SIGKILL)

    def _exited(self) -> None:
        """The process is a zombie now: kill what it left, then collect it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._burying = loop.create_task(self._collect())

    async def _collect(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(kill_all, self.pid, self._mark)
        code = self._process.wait()
        await asyncio.to_thread(self._reader.join, 1.0)
        self._close()
        self._bury(self._verdict or Death("crash", _how(code) + self._last_words()))

    def _last_words(self) -> str:
        if at := self._current_frame():  # Python's fault handler had the last word
            return f" at {at}"
        lines = self.log.last_lines(1)
        return f"; the last it printed: {lines[0]}" if lines else ""

    def end(self) -> None:
        """Kill the process and all it started, now; rollouts that it plays get no answer."""
        if self._burying is not None:
            self._burying.cancel()
        if self._process is not None and self._process.returncode is None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            kill_all(self.pid, self._mark)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._close()

    def _close(self) -> None:
        for waiting in (self._watching, self._closing):
            if waiting is not None:
                waiting.cancel()
        self._wire.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed by {name}" + (" (out of memory, if nobody else did it)" if name == "SIGKILL" else "")


def _gib(count: int) -> str:
    return f"{count / 1024**3:.2f} GiB"
