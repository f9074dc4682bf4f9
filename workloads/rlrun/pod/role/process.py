"""Process of the role, and the duties of a container's first process: forward signals, collect orphans, leave no process running."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlrun.pod.role.output import STDERR, STDOUT, Output
from rlrun.pod.signals import SIGNALLED, Signals

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
    children = {child.pid: (child, launch) for launch in (*beside, main) for child in (_start(launch),)}
    main_pid = list(children)[-1]
    signals.forward_to(main_pid)
    first, code = _wait(set(children), signals)
    children[first][0].returncode = code  # it has been collected: Popen must not wait for it again
    kill_descendants()
    for child, launch in children.values():
        child.returncode = code if child.returncode is None else child.returncode
        launch.output.drain()
    return code if code >= 0 else SIGNALLED - code, children[first][1]


def _start(launch: Launch) -> subprocess.Popen[bytes]:
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
        launch.output.pump(os.dup(pipe.fileno()), stream)
        pipe.close()
    return child


def _wait(pids: set[int], signals: Signals) -> tuple[int, int]:
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
    while (left := children(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def children(parent: int) -> list[int]:
    """Return the pids of a process's children, including zombies."""
    return [pid for pid, its_parent in _parents().items() if its_parent == parent]


def descendants(ancestor: int) -> list[int]:
    """Return the pids of a process's descendants, ascending, including zombies."""
    parents, found, last = _parents(), set[int](), {ancestor}
    while last := {pid for pid, parent in parents.items() if parent in last} - found:
        found |= last
    return sorted(found)


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since
                # The name, in parentheses, may contain anything: state and parent follow the last parenthesis.
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found
