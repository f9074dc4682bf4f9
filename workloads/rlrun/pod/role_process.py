"""Process of the role: its output, its signals, its end, and its stacks if it does not end.

The output is forwarded to the container's log and written to the run's volume, and its end is kept in memory. The volume may be full or
hang. Therefore a separate thread writes to it, and drops data that it cannot write in time, so that the role never waits for it.

The module has the duties of a container's first process: forward signals, collect orphans, leave no process running.

If the role does not end after a stop request, the stacks of all its processes are reported before the kubelet kills it: in a file next to
its log on the run's volume, and in the container's log. Best effort: if the volume hangs, only the file is missing.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlrun.diagnostics import stacks
from rlrun.pod.container_settings import SIGNALLED, Signals
from rlrun.protocol.files.failures import telling_lines
from rlrun.runtime.process_logs import BoundedLog

_CHUNK_BYTES = 64 * 1024
KEPT_BYTES = 64 * 1024
"""Bytes at the end of each stream that are kept in memory."""
_WAITING_CHUNKS = 1024
"""Maximum number of chunks that wait for the volume."""
CLOSE_SECONDS = 5.0
STDOUT, STDERR = 1, 2


class Output:
    """Standard output and error of a role, with a log file.

    Args:
        log: log file on the run's volume, or None.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._ends = {STDOUT: b"", STDERR: b""}
        self._chunks: queue.Queue[bytes | None] = queue.Queue(_WAITING_CHUNKS)
        self._readers: list[threading.Thread] = []
        self._writer = threading.Thread(target=self._write_log, name="log", daemon=True)
        if log is not None:
            self._writer.start()

    def log_message(self, message: str) -> None:
        """Log a line of this process itself."""
        self._forward_chunk(
            STDERR, f"{time.strftime('%H:%M:%S')} | INFO    | pod | {message}\n".encode(), remember=False
        )

    def write_container_log(self, text: bytes) -> None:
        """Write only to the container's log."""
        _write_stream(STDERR, text)

    def forward_stream(self, source: int, stream: int) -> None:
        """Forward a file descriptor's data until its end, in the background; then close it.

        Args:
            source: reading end of a pipe.
            stream: `STDOUT` or `STDERR`.
        """

        def run() -> None:
            with os.fdopen(source, "rb", buffering=0) as pipe:
                while chunk := pipe.read(_CHUNK_BYTES):
                    self._forward_chunk(stream, chunk)

        thread = threading.Thread(target=run, name=f"output-{stream}", daemon=True)
        thread.start()
        self._readers.append(thread)

    def end_text(self) -> str:
        """Return the end of stderr, or of stdout if stderr is empty."""
        return (self._ends[STDERR] or self._ends[STDOUT]).decode(errors="replace")

    def last_lines(self, count: int = 15) -> list[str]:
        """Return the most informative lines of the end."""
        return telling_lines(self.end_text(), count)

    def wait_for_pipes(self) -> None:
        """Wait until the pipes have ended, but only shortly: an unkillable process may hold one open."""
        _join_threads(self._readers)

    def close(self) -> None:
        """Pass the last lines to the volume; waits only shortly, because the volume may hang."""
        self.wait_for_pipes()
        if self._log is not None:
            _queue_chunk(self._chunks, None)
            _join_threads([self._writer])

    def _forward_chunk(self, stream: int, chunk: bytes, *, remember: bool = True) -> None:
        if remember:
            self._ends[stream] = (self._ends[stream] + chunk)[-KEPT_BYTES:]
        _write_stream(stream, chunk)
        if self._log is not None:
            _queue_chunk(self._chunks, chunk)

    def _write_log(self) -> None:
        assert self._log is not None
        file = BoundedLog(self._log)  # the container's log has these bytes as well
        while (chunk := self._chunks.get()) is not None:
            file.append(chunk)


def _write_stream(stream: int, chunk: bytes) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[os.write(stream, view) :]
    except OSError:  # the container's log has no reader any more: the role continues
        pass


def _queue_chunk(chunks: queue.Queue[bytes | None], chunk: bytes | None) -> None:
    try:
        chunks.put_nowait(chunk)
    except queue.Full:
        return


def _join_threads(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
KILL_SECONDS = 10.0
"""Maximum wait for killed processes to end; a process inside a hanging file system cannot end."""


@dataclass(frozen=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    env: Mapping[str, str]
    """Complete environment of the process."""
    output: Output
    """Receiver of its output."""


def run_process(main: Launch, *beside: Launch, signals: Signals) -> tuple[int, Launch]:
    """Start processes, each in its own session, wait until one of them ends, and end all others.

    Args:
        main: process that receives forwarded signals.
        beside: processes that end with it, or whose end ends it.
        signals: signals to forward.

    Returns:
        Exit code of the first process that ended, 128 + n if signal n ended it; and which process it was.
    """
    # Orphans of a child become children of this process, even if it is not the first process of a PID namespace.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Each child has its own session, so that a kill of its group reaches the processes that it started.
    children = {child.pid: (child, launch) for launch in (*beside, main) for child in (_start_process(launch),)}
    main_pid = list(children)[-1]
    signals.forward_to(main_pid)
    first, code = _wait_for_end(set(children), signals)
    children[first][0].returncode = code  # it has been collected: Popen must not wait for it again
    # Before `wait_for_pipes`, which waits for the end of the pipes: any process that still runs may hold them open.
    kill_descendants()
    for child, launch in children.values():
        child.returncode = code if child.returncode is None else child.returncode
        launch.output.wait_for_pipes()
    return code if code >= 0 else SIGNALLED - code, children[first][1]


def _start_process(launch: Launch) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        list(launch.command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(launch.env),
        start_new_session=True,
    )
    for pipe, stream in ((child.stdout, STDOUT), (child.stderr, STDERR)):
        assert pipe is not None
        launch.output.forward_stream(os.dup(pipe.fileno()), stream)
        pipe.close()
    return child


def _wait_for_end(pids: set[int], signals: Signals) -> tuple[int, int]:
    """Collect children until one of `pids` ends, and kill its group. Returns its pid and exit code, -n for signal n."""
    while True:
        # Observe it before collecting it: until then neither the pid nor the group id can be reused.
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert found is not None
        if found.si_pid in pids:
            signals.forward_to(None)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
        _, status = os.waitpid(found.si_pid, 0)
        if found.si_pid in pids:
            return found.si_pid, os.waitstatus_to_exitcode(status)


def kill_descendants() -> None:
    """Kill and collect every process that this process has started or inherited."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := child_pids(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def child_pids(parent: int) -> list[int]:
    """Return the pids of a process's children, including zombies."""
    return [pid for pid, its_parent in _parent_pids().items() if its_parent == parent]


def descendant_pids(ancestor: int) -> list[int]:
    """Return the pids of a process's descendants, ascending, including zombies."""
    parents, found, last = _parent_pids(), set[int](), {ancestor}
    while last := {pid for pid, parent in parents.items() if parent in last} - found:
        found |= last
    return sorted(found)


def _parent_pids() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since
                # The name, in parentheses, may contain anything: state and parent follow the last parenthesis.
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


_SHOWN_BYTES = 64 * 1024
"""Maximum bytes of a dump in the container's log."""
_CLOSE_SECONDS = 5.0


class StuckRole:
    """Watcher of the role's end from the first signal on. A context: entered before the role starts, left when it has ended.

    Args:
        signals: signals of this process.
        after: seconds from the signal to the dump.
        file: file that `RLRUN_STACKS_FILE` names in the role's environment.
        keep: file that keeps the dump.
        output: output of the role.
    """

    def __init__(self, signals: Signals, *, after: float, file: Path, keep: Path, output: Output) -> None:
        self._signals, self._after, self._file, self._keep, self._output = signals, after, file, keep, output
        self._ended_reader, self._ended_writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._report_stacks, name="stuck", daemon=True)

    def __enter__(self) -> Self:
        self._file.touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._ended_writer, b"x")
        self._thread.join(_CLOSE_SECONDS)

    def _report_stacks(self) -> None:
        if self._has_ended(None, self._signals) or self._has_ended(self._after):
            return
        try:
            why = f"the role has not ended {self._after:g} s after the stop request"
            dump = stacks.request_stacks(descendant_pids(os.getpid()), self._file, why=why)
        except OSError as error:
            self._output.log_message(f"cannot read the stacks of the role: {error}")
            return
        if not dump:
            self._output.log_message(f"{why}; none of its processes reports its stacks")
            return
        self._output.log_message(f"{why}; its stacks are written to {self._keep}")
        self._output.write_container_log(dump[:_SHOWN_BYTES])
        try:
            self._keep.parent.mkdir(parents=True, exist_ok=True)
            with self._keep.open("ab") as out:
                out.write(dump)
        except OSError as error:
            self._output.log_message(f"cannot write {self._keep}: {error.strerror}")

    def _has_ended(self, seconds: float | None, *others: Signals) -> bool:
        """Return whether the role has ended, within these seconds and before one of the others is readable."""
        found, _, _ = select.select([self._ended_reader, *(other.fileno() for other in others)], [], [], seconds)
        return self._ended_reader in found
