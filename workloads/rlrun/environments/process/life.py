"""One life of an environment's process: start, monitoring and end, as the orchestrator controls it."""

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
from rlrun.environments.process.containment import enclosure
from rlrun.environments.process.containment.keeper import (
    MARK_VARIABLE,
    STACKS,
    Known,
    descendant_usage,
    is_stopped,
    kill_all,
    kill_descendants,
)
from rlrun.environments.process.heartbeat import Page
from rlrun.environments.process.process_output import EVERYTHING, Log, named_by, passed_variables, withheld_hint
from rlrun.environments.process.talk import Death, DeathKind, Ready, StartError, Talk
from rlrun.environments.process.wire import Document, WireError
from rlrun.environments.process.worker import BROKEN_LOOP, LOST
from rlrun.runtime.bootstrap import python_command

MAX_PROCESSES = 256
"""Largest number of processes. More count as a fork bomb."""
CLOSE_SECONDS = 5.0
"""Longest time between the end of the connection and the end of the process."""
STACK_SECONDS = 10.0
"""Longest wait for a hanging process to write its stack. On a busy machine it may be scheduled late."""
DEAF_SECONDS = 7.0
"""Total time for which an event loop may wait for events without answering a ping. With the check before it and the kill: 10 s."""
PING_LOOKS = 3
"""Smallest number of checks that find a ping unanswered. Without it, a delay of this process could look like one of the environment."""
_HUNG_UP = "closed its connection, which only its own code can do"


@dataclass(frozen=True)
class Limits:
    """Resource limits of one environment's process."""

    start_seconds: float = 300.0
    """Time limit for loading the environment's tasks."""
    memory_bytes: int = 8 * 1024**3
    """Resident memory of all its processes together."""
    hang_seconds: float = 60.0
    """Time for which one call may block the event loop, or the process may give no sign of life."""
    look_seconds: float = 1.0
    """Time between two checks of memory and event loop."""
    deaf_seconds: float = DEAF_SECONDS
    """See `DEAF_SECONDS`."""


@dataclass(frozen=True)
class Command:
    """Environment, or other user code, to start.

    Args:
        id: id of the environment, or import path of other code.
        args: arguments of the environment; options of a function.
        python: interpreter. None: the interpreter of this process.
        kind: kind of code. A loss or an advantage is only imported and checked, never called. A check is called with `args` and raises
            an error for invalid values.
        variables: additional environment variables of the process, see `process_output`.
        is_alone: whether no other process of the container has a secret, so that the process may write all files of the container.
        given: variables from the orchestrator's container that replace those of this process. None: this is the orchestrator's container.
        withheld: names of variables that the orchestrator has and did not pass on.
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
        """Return the environment variables that the process gets, out of the given ones."""
        if self.kind != "environment":  # code that runs in the roles themselves, which have all variables
            return passed_variables(variables, (EVERYTHING,))
        return passed_variables(variables, (*self.variables, *named_by(self.id, self.args)))


class Life(Talk):
    """A process that is started once. All methods must be called in the event loop that created the object.

    Args:
        command: environment to start.
        limits: resource limits of the process.
        log: log for its output.
        number: number of this life of the environment, from 1.
    """

    def __init__(self, command: Command, limits: Limits, log: Log, number: int = 1) -> None:
        super().__init__(command.id, number)
        self.command, self.limits, self.log = command, limits, log
        self.peak_memory_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._mark = uuid.uuid4().hex
        self._folder: Path | None = None
        """Private folder of the process, if it may write only there."""
        self._withheld: Set[str] = frozenset()
        """Names of environment variables that the process did not get."""
        self._verdict: Death | None = None
        self._page = Page()
        self._received_at = 0.0
        """Time of its last message, on the monotonic clock."""
        self._pinged = self._answered_ping = 0
        """Number of the last ping, and of the last answered ping."""
        self._looks = 0
        """Checks that found the last ping unanswered."""
        self._idle_before = 0.0
        """Idle time of the event loop when the last ping was sent, in seconds."""
        self._seen: set[Known] = set()
        """All processes of the environment that were seen so far."""
        self._killing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._burying: asyncio.Task[None] | None = None

    async def start(self) -> Ready:
        """Start the process and load the environment.

        Raises:
            StartError: the environment cannot be loaded, or its process ended or took too long.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._process = self._spawn_process(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        # From here on the pidfd reports the end of the process, also if the process ends before it connects.
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        try:
            await loop.create_unix_connection(lambda: self._wire, sock=ours)
            self._wire.send(
                {"op": "load", "kind": self.command.kind, "id": self.command.id, "args": dict(self.command.args)}
            )
            # The first of three events decides: the environment is loaded, its process ended, or the time is over.
            waiting: set[asyncio.Future[Ready] | asyncio.Future[Death]] = {self._ready, self.ended}
            await asyncio.wait(waiting, timeout=self.limits.start_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                ready = self._ready.result()
            elif self.ended.done():
                raise StartError(f"its process {self.ended.result().message} while loading")
            else:
                raise StartError(
                    f"it did not load within {self.limits.start_seconds:g} seconds{await asyncio.to_thread(self._request_stack)}"
                )
        except BaseException:
            self.end()
            raise
        self._watching = loop.create_task(self._watch_process())
        return ready

    def _make_folder(self, environment: dict[str, str]) -> tuple[dict[str, str], list[Path]]:
        """Create a private folder for the process, if the machine can deny it write access to all other folders.

        Returns:
            Environment variables of the process, and the only folders that it may write; an empty list means all folders.
        """
        if self.command.kind != "environment" or self.command.is_alone or not enclosure.is_available():
            return environment, []
        try:
            self._folder = enclosure.make_private_folder()
        except OSError as error:
            raise StartError(f"cannot create the folder {error.filename}: {error.strerror}") from error
        environment = enclosure.use_private_folder(environment, self._folder)
        return environment, [self._folder, *enclosure.make_hub_caches(environment)]

    def _spawn_process(self, descriptor: int) -> subprocess.Popen[bytes]:
        numbers = (descriptor, self._page.descriptor, os.getpid(), self.limits.memory_bytes)
        environment = self.command.passed({**os.environ, **(self.command.given or {})})
        self._withheld = (os.environ.keys() | self.command.withheld) - environment.keys()
        environment, writable = self._make_folder(environment)
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                python_command(worker.__name__, [*map(str, (*numbers, *writable))], python=self.command.python),
                cwd=enclosure.working_directory(self._folder) if self._folder is not None else None,
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
            self._page.close_descriptor()
        self._reader = self.log.follow(reading)
        return process

    def metrics(self) -> dict[str, float]:
        return {"memory_gib": self.peak_memory_bytes / 1024**3, "stall_seconds": self._page.read().worst_seconds}

    def _receive_message(self, document: Document) -> None:
        self._received_at = time.monotonic()
        super()._receive_message(document)

    def _handle_pong(self, document: Document) -> None:
        self._answered_ping = int(document["number"])

    def _add_advice(self, message: str) -> str:
        refused = "" if self._folder is None else enclosure.refused_hint(message)
        return message + (refused or withheld_hint(message, self._withheld))

    def _on_connection_lost(self, error: WireError | None) -> None:
        if (
            self._pidfd < 0
        ):  # `_release_resources` closed the connection: there is nothing to kill, and the pid may belong to another process
            return
        if error is not None:
            self._end_process(
                "crash", f"broke the protocol ({error}), perhaps by writing to a descriptor that is not its own"
            )
            return
        # Either the process is about to exit, and its exit code gives a better reason, or it closed a connection that it cannot reopen.
        self._closing = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._end_process, "crash", _HUNG_UP)

    # ---- its end

    async def _watch_process(self) -> None:
        while True:
            await asyncio.sleep(self.limits.look_seconds)
            # Reading /proc takes milliseconds, so it runs in a thread.
            taken = await asyncio.to_thread(descendant_usage, self.pid, self.limits.memory_bytes)
            self._seen |= taken.members
            self.peak_memory_bytes = max(self.peak_memory_bytes, taken.memory_bytes)
            # A limit of the whole process is checked first, because a process over it may also be slow to answer.
            if taken.memory_bytes > self.limits.memory_bytes:
                limit = f"more than memoryGib allows ({_show_gib(self.limits.memory_bytes)})"
                self._end_process(
                    "memory", f"used {_show_gib(taken.memory_bytes)}, {limit}", rollout=0
                )  # rollout 0, because all rollouts may have used memory
            elif (count := len(taken.members)) > MAX_PROCESSES:
                self._end_process("crash", f"was ended because it ran {count} processes (the limit is {MAX_PROCESSES})")
            elif message := self._find_hang() or self._check_ping():
                rollout = self._page.read().rollout
                # The cause is recorded before the request for the stack: its signal may end the process, which must not look like a crash.
                self._verdict = self._verdict or Death("hang", message, rollout)
                at = await asyncio.to_thread(self._request_stack)
                self._verdict = Death(self._verdict.kind, self._verdict.message + at, self._verdict.rollout)
                self._end_process("hang", message)

    def _find_hang(self) -> str | None:
        """Return the reason why the process counts as hanging, or None."""
        pulse, now, limit = self._page.read(), time.monotonic(), self.limits.hang_seconds
        if pulse.held_seconds > limit:
            return f"did not answer for {pulse.held_seconds:.1f} s: code in it computes or waits without awaiting"
        silent = now - max(pulse.beat, self._received_at)
        if silent <= limit:
            return None
        if is_stopped(pulse.pid):
            return f"did not answer for {silent:.1f} s: it was stopped by a signal (SIGSTOP or the like)"
        return f"did not answer for {silent:.1f} s: code in it holds the interpreter's lock"

    def _check_ping(self) -> str | None:
        """Ping the event loop. Returns the reason why the process counts as deaf, or None.

        The heartbeat shows only that the threads run. A busy event loop answers a ping late, but is not deaf. Therefore only the time
        counts for which the loop waits for events, because it would answer a ping immediately during that time.
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
        return f"did not answer for {silent:.1f} s although its event loop was idle: code in it took the connection from the loop"

    def _request_stack(self) -> str:
        """Request the stack of the process, which writes it to its log, and return the innermost line as text; "" without an answer."""
        if is_stopped(self._page.read().pid):
            return ""
        self._send_signal(STACKS)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and self._burying is None:  # the signal may have ended the process
            time.sleep(0.05)
            if at := self._current_frame(whole=True):  # the signal handler writes a line in several parts
                return f"; it is at {at}"
        return ""

    def _current_frame(self, *, whole: bool = False) -> str | None:
        """Return the innermost line of the last stack in the log, or None."""
        lines = self.log.last_lines(200, whole=whole)
        stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
        return lines[stacks[-1] + 1] if stacks and len(lines) > stacks[-1] + 1 else None

    def _send_signal(self, number: signal.Signals) -> None:
        # `Popen.send_signal` is not used because it may collect the process, see `kill_all`.
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _end_process(self, kind: DeathKind, message: str, *, rollout: int | None = None) -> None:
        """End the process. The first cause is kept. With `rollout` None, the rollout whose code runs counts as the cause."""
        if self._verdict is None:
            self._verdict = Death(kind, message, self._page.read().rollout if rollout is None else rollout)
        if self._killing is None:
            self._killing = asyncio.get_running_loop().create_task(self._kill_now())

    async def _kill_now(self) -> None:
        """Kill the descendants, then the process itself: no process can leave its keeper while the keeper lives."""
        await asyncio.to_thread(kill_descendants, self.pid, reap=lambda: None, known=self._seen)
        self._send_signal(signal.SIGKILL)

    def _on_exit(self) -> None:
        """Kill the remaining processes while this one is a zombie, then collect it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._burying = loop.create_task(self._collect_process())

    async def _collect_process(self) -> None:
        assert self._process is not None
        # Kill the other processes before `wait` collects the leader: afterwards its pid could belong to another process.
        await asyncio.to_thread(kill_all, self.pid, self._mark, self._seen)
        code = self._process.wait()
        # Only now the log is complete: its writers have ended. The folder can be removed for the same reason.
        await asyncio.to_thread(self._reader.join, 1.0)
        await asyncio.to_thread(self._remove_folder)
        await self._wire.settled()  # receive the results that the process sent before its end
        rollout = self._page.read().rollout
        self._release_resources()
        self._report_end(
            self._verdict or Death("crash", self._add_advice(_describe_end(code) + self._last_words()), rollout)
        )

    def _last_words(self) -> str:
        if at := self._current_frame():  # Python's fault handler wrote a stack
            return f" at {at}"
        lines = self.log.last_lines(1)
        return f"; its last output: {lines[0]}" if lines else ""

    def end(self) -> None:
        """Kill the process and all its descendants now. Its rollouts get no result."""
        if self._burying is not None:
            self._burying.cancel()
        if self._process is not None and self._process.returncode is None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            kill_all(self.pid, self._mark, self._seen)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._remove_folder()
        self._release_resources()

    def _release_resources(self) -> None:
        for waiting in (self._watching, self._closing, self._killing):
            if waiting is not None:
                waiting.cancel()
        self._wire.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _remove_folder(self) -> None:
        if self._folder is not None:
            enclosure.remove_private_folder(self._folder)


_STACK = ("Current thread", "Stack (most recent call first)")
"""First words of a stack from Python's fault handler: after a crash, and on request."""


def _describe_end(code: int) -> str:
    if code in (BROKEN_LOOP, LOST):
        return _HUNG_UP if code == LOST else "closed descriptors of the process, and its event loop could not continue"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed by {name}" + (" (usually because of too little memory)" if name == "SIGKILL" else "")


def _show_gib(count: int) -> str:
    return f"{count / 1024**3:.2f} GiB"
