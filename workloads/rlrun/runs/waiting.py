"""Waiting for a run's phase, step or end."""

from __future__ import annotations

import time

from rlrun.inspect import screen
from rlrun.inspect.kubectl import Api
from rlrun.inspect.source import FolderRun, Run, read_run
from rlrun.inspect.why import explain_run
from rlrun.runs.acts import is_running
from rlrun.runs.errors import RunError, RunFailedError, WaitTimeoutError
from rlrun.runs.launch import Launched, read_snapshot

_OVER = ("Complete", "Failed")
PHASES = (
    "Pending",
    "Starting",
    "Running",
    "Restarting",
    "Suspending",
    "Suspended",
    "Completing",
    *_OVER,
)
_OFTEN_SECONDS = 0.2


def wait_for(
    run: Run, api: Api, launched: Launched | None, *, phase: str, step: int | None, timeout: float | None, every: float
) -> None:
    """Wait for a phase or for a step; see `Run.wait`."""
    if step is None and phase not in PHASES:
        raise RunError(f"phase: got {phase!r}; expected one of {', '.join(PHASES)}")
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        seen = read_snapshot(run, api, launched, time.time())
        if (seen.progress.step or 0) >= step if step is not None else seen.phase == phase:
            return
        stopped = isinstance(run, FolderRun) and seen.phase == "Suspended"
        if seen.phase in _OVER or stopped:
            now = time.time()
            raise RunFailedError(screen.explanation_text(explain_run(seen, now), now))
        lacks = f"has not trained step {step}" if step is not None else f"is not {phase}"
        _pause(deadline, every, f"{seen.name} {lacks}", timeout, f": {seen.phase}, step {screen.show_steps(seen)}")


def wait_until_stopped(run: Run, api: Api, launched: Launched | None, *, timeout: float | None) -> None:
    """Wait until all roles of a run have stopped, however it ended."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _is_stopped(run, api, launched):
        name = str(run.root) if isinstance(run, FolderRun) else run.name
        _pause(deadline, _OFTEN_SECONDS, f"{name} has not stopped", timeout)


def _is_stopped(run: Run, api: Api, launched: Launched | None) -> bool:
    if isinstance(run, FolderRun):
        return (launched is None or launched.code() is not None) and not is_running(run)
    return read_run(run, api, time.time(), events=False).phase in (*_OVER, "Suspended")


def _pause(deadline: float | None, every: float, what: str, timeout: float | None, now: str = "") -> None:
    left = every if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise WaitTimeoutError(f"{what} after {timeout:g} s{now}; it continues")
    time.sleep(min(every, left))
