"""Starts, watches and ends the roles' processes, and reports why one failed.

Nothing that a launch started outlives it, and nothing else is touched.

A role may start processes of its own (torchrun its ranks, vLLM its engine core), in sessions of their own. Each inherits the launch's id
in its environment; ending a role means ending its process group, and at the end every process that still carries the id. The launcher
makes itself the reaper of orphans, so that a role's killed parent does not hide its children. Should the launcher itself be killed, the
kernel signals the roles (parent-death signal).
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
from rlrun.diagnostics.crash import describe_end
from rlrun.local.plan import RoleProcess
from rlrun.protocol.files.failures import read_error, telling_lines, volume_is_full
from rlrun.runtime import exit_codes
from rlrun.runtime.bounded_log import cut_back
from rlrun.runtime.printable import printable
from rlrun.runtime.processes import LAUNCH_VARIABLE, processes_with

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
STOP_SECONDS = 15.0
"""Seconds that a role may take to end after SIGTERM, beyond what it has to save."""


@dataclass
class Running:
    """A started process."""

    spec: RoleProcess
    process: subprocess.Popen[bytes]


def _die_with_parent() -> None:
    # SIGTERM, not SIGKILL: torchrun and vLLM then end the processes that they started themselves.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stacks_file(spec: RoleProcess) -> Path:
    """File for the stacks of the role's processes when they do not end, beside its log."""
    return spec.log.with_name(spec.log.stem + stacks.SUFFIX)


def marked_processes(launch_id: str) -> list[int]:
    """Pids of all processes of this launch, zombies excepted."""
    return processes_with(LAUNCH_VARIABLE, launch_id)


class Supervisor:
    """The processes of one launch.

    Args:
        launch_id: marks them.
        locks: descriptors that the roles with GPUs hold too, as long as they live.
    """

    def __init__(self, launch_id: str, locks: Sequence[int] = ()) -> None:
        self._launch_id, self._locks = launch_id, locks
        self.running: list[Running] = []
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, specs: Sequence[RoleProcess]) -> None:
        """Start every process, its output appended to its log."""
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

    def exited(self) -> list[Running]:
        """Processes that have ended; the logs of all are kept within their bound."""
        for running in self.running:
            cut_back(running.spec.log)
        return [r for r in self.running if r.process.poll() is not None]

    def of_role(self, role: str) -> list[Running]:
        """The processes of one role."""
        return [r for r in self.running if r.spec.role == role]

    def stop(self, grace_seconds: float = STOP_SECONDS, hurry: Callable[[], bool] = lambda: False) -> None:
        """End everything that this launch started: SIGTERM, then SIGKILL for what is left. Safe to call twice.

        Args:
            grace_seconds: between the two.
            hurry: ends this time early as soon as it is true.
        """
        for running in self.running:
            if running.process.poll() is None:
                running.process.terminate()
        began, asked = time.monotonic(), False
        while time.monotonic() - began < grace_seconds and not hurry() and self._left():
            if not asked and time.monotonic() - began >= stacks.seconds_until_stacks(grace_seconds):
                asked = True
                self._ask_for_stacks()
            time.sleep(0.05)
        # Whatever carries the mark now has outlived its role's grace: ranks of a killed torchrun, an engine core.
        deadline = time.monotonic() + STOP_SECONDS
        while (left := self._alive()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap()
            time.sleep(0.05)
        for running in self.running:
            running.process.wait()
        self._reap()
        for running in self.running:
            with suppress(OSError):
                if not stacks_file(running.spec).stat().st_size:
                    stacks_file(running.spec).unlink()

    def _left(self) -> list[Running]:
        """Processes that have not ended."""
        return [r for r in self.running if r.process.poll() is None]

    def _alive(self) -> list[int]:
        """Pids of all that this launch started: those with its mark, and roles whose variables nobody may read (see `privacy`)."""
        return sorted({*marked_processes(self._launch_id), *(r.process.pid for r in self._left())})

    def _ask_for_stacks(self) -> None:
        """Ask roles that do not stop for their stacks, before they are killed."""
        for running in self._left():
            file = stacks_file(running.spec)
            with suppress(OSError):  # a courtesy: the volume may be full
                if stacks.request_stacks(self._alive(), file, why=f"{running.spec.role} does not end"):
                    with running.spec.log.open("a") as log:
                        log.write(f"the role does not end although it was asked to; what it does is in {file}\n")

    @staticmethod
    def _reap() -> None:
        """Collect orphans that were handed to this process."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def last_lines(log: Path, count: int = 15) -> list[str]:
    """Most informative lines of the end of a log; a few lines of a traceback help more than a name of a file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            return telling_lines(file.read().decode(errors="replace"), count)
    except OSError:
        return []


def first_cause(failed: Sequence[Running]) -> Running:
    """First cause among roles that ended within one look: the one with an error report; else the first."""
    return next((running for running in failed if read_error(running.spec.error_file.parent) is not None), failed[0])


def exit_code_of(failed: Running, root: Path) -> int:
    """The exit code of a run that a role's failure ended."""
    said, code = read_error(failed.spec.error_file.parent), failed.process.returncode
    if said is not None:
        return said.code or exit_codes.FAILURE
    if volume_is_full(root):
        return exit_codes.STORAGE
    return code if code is not None and 0 < code < 128 else exit_codes.FAILURE


def explain_failure(failed: Running, root: Path) -> None:
    """Print the failure on stderr."""
    code = failed.process.returncode
    print(f"\nerror: {failed.spec.name} {describe_end(code) if code is not None else 'still runs'}", file=sys.stderr)
    said = read_error(failed.spec.error_file.parent)
    if said is not None:
        first, *more = printable(str(said), lines=True).splitlines()
        print("\n".join([f"  {first}", *(f"  | {line}" for line in more)]), file=sys.stderr)
    elif volume_is_full(root):
        print(f"  the volume of {root} is full (No space left on device); make space", file=sys.stderr)
    else:
        print("  its last lines:", file=sys.stderr)
        for line in last_lines(failed.spec.log):
            print(f"  | {line}", file=sys.stderr)
    print(f"  its log: {failed.spec.log}", file=sys.stderr)
