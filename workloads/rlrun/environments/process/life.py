"""One life of an environment's process, from its start to its end, seen from the orchestrator."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlrun.environments.process import worker
from rlrun.environments.process.containment import enclosure, private_folder
from rlrun.environments.process.containment.keeper import STACKS
from rlrun.environments.process.containment.kill import (
    MARK_VARIABLE,
    Known,
    descendant_usage,
    is_stopped,
    kill_all,
    kill_descendants,
)
from rlrun.environments.process.heartbeat import Page
from rlrun.environments.process.log import Log
from rlrun.environments.process.talk import Death, DeathKind, Ready, StartError, Talk
from rlrun.environments.process.variables import EVERYTHING, named_by, passed_variables, withheld_hint
from rlrun.environments.process.wire import Document, WireError
from rlrun.environments.process.worker import BROKEN_LOOP, LOST
from rlrun.runtime.bootstrap import python_command

MAX_PROCESSES = 256
"""Most processes; more are taken for a fork bomb."""
CLOSE_SECONDS = 5.0
"""Longest time between the end of the connection and that of the process."""
STACK_SECONDS = 10.0
"""Longest wait for a process that hangs to write where it is; on a busy machine it has its turn late."""
DEAF_SECONDS = 7.0
"""Time for which an event loop may wait for events, all together, and not hear a ping. With the look before it and the kill: 10 s."""
PING_LOOKS = 3
"""Least number of looks that find a ping unanswered: this process may have had no turn itself to read the answer."""
_HUNG_UP = "closed its connection, which only it itself can have done"


@dataclass(frozen=True)
class Limits:
    """Resource limits of one environment's process."""

    start_seconds: float = 300.0
    """Deadline for loading its tasks."""
    memory_bytes: int = 8 * 1024**3
    """Resident memory of all its processes together."""
    hang_seconds: float = 60.0
    """Time for which one call may hold its event loop, or the process give no sign of life."""
    look_seconds: float = 1.0
    """Time between two looks at memory and event loop."""
    deaf_seconds: float = DEAF_SECONDS
    """See `DEAF_SECONDS`."""


@dataclass(frozen=True)
class Command:
    """Environment to start.

    Args:
        id: the environment's id.
        args: its arguments; the options of a function.
        python: the interpreter; None: this one.
        kind: what `id` names; a loss or advantage is an import path that is only checked, never called; a check is one that is called
            with `args` and raises what it refuses.
        variables: names of environment variables that it gets besides the usual ones, see `variables`.
        is_alone: no other process of the container holds a secret, so that it may write all files of the container.
        given: variables that replace those of this process, from the orchestrator's container; None: this is its container.
        withheld: names of variables that the orchestrator has and did not give.
    """

    id: str
    args: Mapping[str, object]
    python: str | None = None
    kind: Literal["environment", "loss", "advantage", "check"] = "environment"
    variables: tuple[str, ...] = ()
    is_alone: bool = False
    given: Mapping[str, str] | None = None
    withheld: frozenset[str] = frozenset()

    def passed(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Environment variables of this process that it gets."""
        if self.kind != "environment":  # code of the roles, which have all of them
            return passed_variables(variables, (EVERYTHING,))
        return passed_variables(variables, (*self.variables, *named_by(self.id, self.args)))


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
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._mark = uuid.uuid4().hex
        self._folder: Path | None = None
        """Its private folder, if it writes nowhere else."""
        self._withheld: Set[str] = frozenset()
        """Names of environment variables that it did not get."""
        self._verdict: Death | None = None
        self._page = Page()
        self._heard = 0.0
        """Time of its last message, on the monotonic clock."""
        self._pinged = self._answered_ping = 0
        """Number of the last ping, and of the last one that was answered."""
        self._looks = 0
        """Looks that found the last ping unanswered."""
        self._idle_before = 0.0
        """Idle time of the event loop when the last ping was sent, in seconds."""
        self._seen: set[Known] = set()
        """All processes that it was seen to have."""
        self._killing: asyncio.Task[None] | None = None
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
            self._wire.send(
                {"op": "load", "kind": self.command.kind, "id": self.command.id, "args": dict(self.command.args)}
            )
            waiting: set[asyncio.Future[Ready] | asyncio.Future[Death]] = {self._ready, self.ended}
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

    def _make_folder(self, environment: dict[str, str]) -> tuple[dict[str, str], list[Path]]:
        """Give the process a private folder, if the machine can refuse it all others.

        Returns:
            Its environment variables, and the only folders that it writes; none: all.
        """
        if self.command.kind != "environment" or self.command.is_alone or not enclosure.is_available():
            return environment, []
        try:
            self._folder = private_folder.make_private_folder()
        except OSError as error:
            raise StartError(f"cannot make its folder {error.filename}: {error.strerror}") from error
        environment = private_folder.use_private_folder(environment, self._folder)
        return environment, [self._folder, *private_folder.make_hub_caches(environment)]

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        numbers = (descriptor, self._page.descriptor, os.getpid(), self.limits.memory_bytes)
        environment = self.command.passed({**os.environ, **(self.command.given or {})})
        self._withheld = (os.environ.keys() | self.command.withheld) - environment.keys()
        environment, writable = self._make_folder(environment)
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                python_command(worker.__name__, [*map(str, (*numbers, *writable))], python=self.command.python),
                cwd=private_folder.working_directory(self._folder) if self._folder is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[descriptor, self._page.descriptor],
                env=environment | {MARK_VARIABLE: self._mark, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as error:
            os.close(reading)
            raise StartError(
                f"cannot start {self.command.python}: {error.strerror}", permanent=True, missing=True
            ) from error
        finally:
            os.close(writing)
            self._page.forget_descriptor()
        self._reader = self.log.follow(reading)
        return process

    def metrics(self) -> dict[str, float]:
        return {"memory_gib": self.peak_memory_bytes / 1024**3, "stall_seconds": self._page.read().worst_seconds}

    def _receive(self, document: Document) -> None:
        self._heard = time.monotonic()
        super()._receive(document)

    def _answered(self, document: Document) -> None:
        self._answered_ping = int(document["number"])

    def _explained(self, message: str) -> str:
        refused = "" if self._folder is None else private_folder.refused_hint(message)
        return message + (refused or withheld_hint(message, self._withheld))

    def _lost(self, error: WireError | None) -> None:
        if self._pidfd < 0:  # `_close` has ended the connection: nothing is left to kill, and the pid may be another's
            return
        if error is not None:
            self._kill("crash", f"broke the protocol ({error}), perhaps by writing to a descriptor that is not its own")
            return
        # Either it is about to exit, and its exit code says more, or it has closed what it cannot open again.
        self._closing = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._kill, "crash", _HUNG_UP)

    # ---- its end

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.limits.look_seconds)
            taken = await asyncio.to_thread(descendant_usage, self.pid, self.limits.memory_bytes)
            self._seen |= taken.members
            self.peak_memory_bytes = max(self.peak_memory_bytes, taken.memory_bytes)
            if taken.memory_bytes > self.limits.memory_bytes:
                limit = f"more than memoryGib allows ({_show_gib(self.limits.memory_bytes)})"
                self._kill(
                    "memory", f"used {_show_gib(taken.memory_bytes)}, {limit}", rollout=0
                )  # all may have a part in it
            elif (count := len(taken.members)) > MAX_PROCESSES:
                self._kill("crash", f"was ended because it ran {count} processes (the limit is {MAX_PROCESSES})")
            elif message := self._hung() or self._deaf():
                rollout = self._page.read().rollout
                self._verdict = self._verdict or Death("hang", message, rollout)  # first: to be asked may end it
                at = await asyncio.to_thread(self._stacks)
                self._verdict = Death(self._verdict.kind, self._verdict.message + at, self._verdict.rollout)
                self._kill("hang", message)

    def _hung(self) -> str | None:
        """Reason why it counts as hanging; None: it does not."""
        pulse, now, limit = self._page.read(), time.monotonic(), self.limits.hang_seconds
        if pulse.held_seconds > limit:
            return f"did not answer for {pulse.held_seconds:.1f} s: something in it computes or waits without awaiting"
        silent = now - max(pulse.beat, self._heard)
        if silent <= limit:
            return None
        if is_stopped(pulse.pid):
            return f"did not answer for {silent:.1f} s: it was stopped by a signal (SIGSTOP or the like)"
        return f"did not answer for {silent:.1f} s: something in it holds the interpreter's lock"

    def _deaf(self) -> str | None:
        """Ping the event loop; returns why the process counts as deaf, or None if it does not.

        The heartbeat shows only that its threads run. An event loop with much to do hears a ping late and is not deaf: only the time for
        which it waits for events counts, in which it would hear the ping at once.
        """
        idle = self._page.read().idle_seconds
        if self._answered_ping >= self._pinged or self._wire.busy:
            self._pinged, self._looks, self._idle_before = self._pinged + 1, 0, idle
            self._wire.send({"op": "ping", "number": self._pinged})
            return None
        self._looks += 1
        silent = idle - self._idle_before
        if self._looks < PING_LOOKS or silent <= self.limits.deaf_seconds:
            return None
        return f"did not hear anything for {silent:.1f} s while its event loop waited: something in it took the connection from the loop"

    def _stacks(self) -> str:
        """Place of the process in its code, as it writes it into its log when asked; "" when it cannot."""
        if is_stopped(self._page.read().pid):
            return ""
        self._signal(STACKS)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and self._burying is None:  # else the question has ended it
            time.sleep(0.05)
            if at := self._current_frame(whole=True):  # the handler writes a line piece by piece
                return f"; it is at {at}"
        return ""

    def _current_frame(self, *, whole: bool = False) -> str | None:
        """The innermost line of the last stack in the log."""
        lines = self.log.last_lines(200, whole=whole)
        stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
        return lines[stacks[-1] + 1] if stacks and len(lines) > stacks[-1] + 1 else None

    def _signal(self, number: signal.Signals) -> None:
        # Not `Popen.send_signal`: that may collect the process, see `kill_all`.
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _kill(self, kind: DeathKind, message: str, *, rollout: int | None = None) -> None:
        """End it; the first verdict stands. `rollout` None: the one whose code runs has done it."""
        if self._verdict is None:
            self._verdict = Death(kind, message, self._page.read().rollout if rollout is None else rollout)
        if self._killing is None:
            self._killing = asyncio.get_running_loop().create_task(self._kill_now())

    async def _kill_now(self) -> None:
        """Kill what the process has started, then the process: as long as its keeper lives nothing can leave it."""
        await asyncio.to_thread(kill_descendants, self.pid, reap=lambda: None, known=self._seen)
        self._signal(signal.SIGKILL)

    def _exited(self) -> None:
        """Kill what the process left, which is a zombie now, then collect it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._burying = loop.create_task(self._collect())

    async def _collect(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(kill_all, self.pid, self._mark, self._seen)
        code = self._process.wait()
        await asyncio.to_thread(self._reader.join, 1.0)
        await asyncio.to_thread(self._remove_folder)
        await self._wire.settled()  # rollouts that it has answered are not lost with it
        rollout = self._page.read().rollout
        self._close()
        self._bury(self._verdict or Death("crash", self._explained(_describe_end(code) + self._last_words()), rollout))

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
            kill_all(self.pid, self._mark, self._seen)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._remove_folder()
        self._close()

    def _close(self) -> None:
        for waiting in (self._watching, self._closing, self._killing):
            if waiting is not None:
                waiting.cancel()
        self._wire.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _remove_folder(self) -> None:
        if self._folder is not None:
            private_folder.remove_private_folder(self._folder)


_STACK = ("Current thread", "Stack (most recent call first)")
"""Beginnings of a stack by Python's fault handler: after a crash, and on request."""


def _describe_end(code: int) -> str:
    if code in (BROKEN_LOOP, LOST):
        return (
            _HUNG_UP if code == LOST else "closed descriptors that are not its own, and its event loop could not go on"
        )
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed by {name}" + (" (out of memory, if nobody else did it)" if name == "SIGKILL" else "")


def _show_gib(count: int) -> str:
    return f"{count / 1024**3:.2f} GiB"
