"""Start, watch and end the roles' processes, and report why one failed.

No process of a launch outlives it, and no other process is signaled.

A role may start processes in sessions of their own (torchrun its ranks, vLLM its engine core). Each one inherits the launch's id in its
environment variables. To end a role, the supervisor ends its process group, and finally every process that still has the id. The launcher
is a subreaper, so the children of a killed role become its own children. If the launcher itself is killed, the kernel signals the roles
(parent-death signal).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlrun.diagnostics import stacks
from rlrun.diagnostics.stacks import describe_end
from rlrun.local.process_plan import RoleProcess
from rlrun.protocol.files.failures import read_error, telling_lines, volume_is_full
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.process_logs import cut_back
from rlrun.runtime.processes import LAUNCH_VARIABLE, processes_with

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
STOP_SECONDS = 15.0
"""Seconds that a role has to end after SIGTERM, in addition to the time for saving."""


@dataclass
class Running:
    """A started process."""

    spec: RoleProcess
    process: subprocess.Popen[bytes]


def _die_with_parent() -> None:
    # SIGTERM, not SIGKILL, lets torchrun and vLLM end the processes that they started themselves.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stacks_file(spec: RoleProcess) -> Path:
    """Return the file for the stacks of a role's processes that do not end. It is next to the log."""
    return spec.log.with_name(spec.log.stem + stacks.SUFFIX)


def marked_processes(launch_id: str) -> list[int]:
    """Return the pids of all processes of this launch, except zombies."""
    return processes_with(LAUNCH_VARIABLE, launch_id)


class Supervisor:
    """Processes of one launch.

    Args:
        launch_id: mark of the processes.
        locks: descriptors of GPU locks. Roles with GPUs inherit them, so the locks are held while a role lives.
    """

    def __init__(self, launch_id: str, locks: Sequence[int] = ()) -> None:
        self._launch_id, self._locks = launch_id, locks
        self.running: list[Running] = []
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, specs: Sequence[RoleProcess]) -> None:
        """Start every process. Its output is appended to its log."""
        for spec in specs:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            spec.error_file.unlink(missing_ok=True)
            stacks_file(spec).touch()
            with spec.log.open("ab") as log:
                process = subprocess.Popen(
                    spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.environment, stacks.FILE_VARIABLE: str(stacks_file(spec))},
                    start_new_session=True,
                    pass_fds=self._locks if spec.gpus else (),
                    preexec_fn=_die_with_parent,
                )
            self.running.append(Running(spec, process))

    def poll_exited(self) -> list[Running]:
        """Return the processes that have ended, and cut all logs to their size limit."""
        for running in self.running:
            cut_back(running.spec.log)
        return [r for r in self.running if r.process.poll() is not None]

    def of_role(self, role: str) -> list[Running]:
        """Return the processes of one role."""
        return [r for r in self.running if r.spec.role == role]

    def stop(self, grace_seconds: float = STOP_SECONDS, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all processes of this launch: SIGTERM first, and SIGKILL after a grace time. A second call is harmless.

        Args:
            grace_seconds: time between the two signals.
            hurry: function that ends the grace time as soon as it returns True.
        """
        for running in self.running:
            if running.process.poll() is None:
                running.process.terminate()
        began, asked = time.monotonic(), False
        while time.monotonic() - began < grace_seconds and not hurry() and self._running_roles():
            if not asked and time.monotonic() - began >= stacks.seconds_until_stacks(grace_seconds):
                asked = True
                self._request_stacks()
            time.sleep(0.05)
        # Processes with the mark have outlived the grace time of their role: ranks of a killed torchrun, an engine core.
        deadline = time.monotonic() + STOP_SECONDS
        while (left := self._live_pids()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap_orphans()
            time.sleep(0.05)
        for running in self.running:
            running.process.wait()
        self._reap_orphans()
        for running in self.running:
            with suppress(OSError):
                if not stacks_file(running.spec).stat().st_size:
                    stacks_file(running.spec).unlink()

    def _running_roles(self) -> list[Running]:
        """Processes that have not ended."""
        return [r for r in self.running if r.process.poll() is None]

    def _live_pids(self) -> list[int]:
        """Pids of all live processes of this launch: those with its mark, and roles with unreadable variables (see `privacy`)."""
        return sorted({*marked_processes(self._launch_id), *(r.process.pid for r in self._running_roles())})

    def _request_stacks(self) -> None:
        """Request the stacks of roles that do not stop, before they are killed."""
        for running in self._running_roles():
            file = stacks_file(running.spec)
            with suppress(OSError):  # the volume may be full; the stacks are optional
                if stacks.request_stacks(self._live_pids(), file, why=f"{running.spec.role} does not end"):
                    with running.spec.log.open("a") as log:
                        log.write(f"the role does not end after SIGTERM; its stacks are in {file}\n")

    @staticmethod
    def _reap_orphans() -> None:
        """Collect orphans that have become children of this process."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def last_lines(log: Path, count: int = 15) -> list[str]:
    """Return the most informative lines at the end of a log, such as those of a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            return telling_lines(file.read().decode(errors="replace"), count)
    except OSError:
        return []


def first_cause(failed: Sequence[Running]) -> Running:
    """Return the probable cause among roles that ended in the same check: the first one with an error report, or else the first one."""
    return next((running for running in failed if read_error(running.spec.error_file.parent) is not None), failed[0])


def exit_code_of(failed: Running, root: Path) -> int:
    """Return the exit code of a run that failed because of a role."""
    report, code = read_error(failed.spec.error_file.parent), failed.process.returncode
    if report is not None:
        return report.code or exit_codes.FAILURE
    if volume_is_full(root):
        return exit_codes.STORAGE
    return code if code is not None and 0 < code < 128 else exit_codes.FAILURE


def explain_failure(failed: Running, root: Path) -> None:
    """Print the failure on stderr."""
    code = failed.process.returncode
    print(f"\nerror: {failed.spec.name} {describe_end(code) if code is not None else 'still runs'}", file=sys.stderr)
    report = read_error(failed.spec.error_file.parent)
    if report is not None:
        first, *more = escape_controls(str(report), lines=True).splitlines()
        print("\n".join([f"  {first}", *(f"  | {line}" for line in more)]), file=sys.stderr)
    elif volume_is_full(root):
        print(f"  the volume of {root} is full (No space left on device); free some space", file=sys.stderr)
    else:
        print("  its last lines:", file=sys.stderr)
        for line in last_lines(failed.spec.log):
            print(f"  | {line}", file=sys.stderr)
    print(f"  its log: {failed.spec.log}", file=sys.stderr)
