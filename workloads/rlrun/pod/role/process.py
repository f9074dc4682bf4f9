"""The role's process, and the duties of a container's first process: pass signals on, collect orphans, leave nothing running."""

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
"""Longest wait for killed processes to end; one inside a hanging file system cannot."""


@dataclass(frozen=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    env: Mapping[str, str]
    """Its whole environment."""
    output: Output
    """Gets what it prints."""


def run_process(main: Launch, *beside: Launch, signals: Signals) -> tuple[int, Launch]:
    """Start processes, each in a session of its own, wait until one of them ends, and end everything that is left.

    Args:
        main: the process that signals are passed on to.
        beside: those that live as long as it, or end it by their own end.
        signals: are passed on.

    Returns:
        The exit code of the one that ended first, 128 + n when signal n ended it; and which one it was.
    """
    # What a child leaves behind becomes ours, also where this is not the first process of a PID namespace.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    children = {child.pid: (child, launch) for launch in (*beside, main) for child in (_start(launch),)}
    main_pid = list(children)[-1]
    signals.forward_to(main_pid)
    first, code = _wait(set(children), signals)
    children[first][0].returncode = code  # it is collected: Popen must not wait for it again
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
    """Collect children until one of `pids` is among them, whose group is killed; returns it and its exit code, -n after signal n."""
    while True:
        # Looked at before it is collected: until then neither the pid nor the group's id can belong to another process.
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
    """Kill and collect every process that this one has started or inherited."""
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
    """Pids of a process's children, zombies included."""
    return [pid for pid, its_parent in _parents().items() if its_parent == parent]


def descendants(ancestor: int) -> list[int]:
    """Pids of a process's children and theirs, ascending, zombies included."""
    parents, found, last = _parents(), set[int](), {ancestor}
    while last := {pid for pid, parent in parents.items() if parent in last} - found:
        found |= last
    return sorted(found)


def _parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # gone meanwhile
                # The name, in parentheses, may hold anything: state and parent follow the last one.
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found
