"""The role's process, and the duties of a container's first process: pass signals on, collect orphans, leave nothing running."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.pod.output import STDERR, STDOUT, Output
from rlrun.pod.signals import SIGNALLED, Signals

_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
KILL_SECONDS = 10.0
"""Longest wait for killed processes to end; one inside a hanging file system cannot."""


def run_process(command: Sequence[str], env: Mapping[str, str], *, output: Output, signals: Signals) -> int:
    """Start a process in a session of its own, wait for it, and end everything that it left.

    Args:
        command: what to start.
        env: its whole environment.
        output: gets what it prints.
        signals: are passed on to it.

    Returns:
        Its exit code; 128 + n when signal n ended it.
    """
    # What a child leaves behind becomes ours, also where this is not the first process of a PID namespace.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        start_new_session=True,
    )
    for pipe, stream in ((child.stdout, STDOUT), (child.stderr, STDERR)):
        assert pipe is not None
        output.pump(os.dup(pipe.fileno()), stream)
        pipe.close()
    signals.forward_to(child.pid)
    code = _wait(child.pid, signals)
    child.returncode = code  # it is collected: Popen must not wait for it again
    kill_descendants()
    output.drain()
    return code if code >= 0 else SIGNALLED - code


def _wait(pid: int, signals: Signals) -> int:
    """Collect children until `pid` is among them, whose group is killed; returns its exit code, -n after signal n."""
    while True:
        # Looked at before it is collected: until then neither the pid nor the group's id can belong to somebody else.
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert found is not None
        if found.si_pid == pid:
            signals.forward_to(None)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(found.si_pid, 0)
        if found.si_pid == pid:
            return os.waitstatus_to_exitcode(status)


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
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # gone meanwhile
                # The name, in parentheses, may hold anything: state and parent follow the last one.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found
