"""Snapshot of a run, with the same structure for a folder on this machine and for an RLRun in a cluster.

The first part formats and parses times and durations.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from rlrun.protocol.files.launcher_record import GpuUse


def format_rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: object) -> float | None:
    """Parse an RFC 3339 time into seconds since the epoch; returns None for other values."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def show_span(seconds: float | None) -> str:
    """Format a duration as `3d4h`, `1h02m`, `3m07s` or `12s`; None as a dash."""
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    if whole >= 86_400:
        return f"{whole // 86_400}d{whole % 86_400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def show_ago(text: str | None, now: float) -> str:
    """Format the duration from an RFC 3339 time to `now`, or a dash."""
    then = seconds_of(text)
    return show_span(None if then is None else now - then)


Place = Literal["folder", "cluster"]
_LONGEST = 6
"""Maximum number of startup phases in a text."""


@dataclass(frozen=True)
class Condition:
    """One condition of the run, as in `status.conditions`."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str
    since: str | None = None
    """Time of the last change of the status (RFC 3339)."""


@dataclass(frozen=True)
class Failure:
    """End of an attempt, as in `status.failures`."""

    attempt: int
    role: str
    process: str
    """Name of the pod, or of the process on this machine."""
    node: str | None
    exit_code: int | None
    reason: str
    message: str
    counted: bool
    step: int | None = None
    time: str | None = None


@dataclass(frozen=True)
class Event:
    """Event about the run."""

    reason: str
    message: str
    warning: bool
    time: str | None
    count: int = 1


@dataclass(frozen=True)
class Process:
    """Pod of the run, or process on this machine."""

    name: str
    role: str
    attempt: int | None
    state: str
    """Phase of the pod, or the reason why its container waits or ended."""
    ready: bool
    restarts: int = 0
    node: str | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Role:
    """Pods of one role."""

    desired: int
    ready: int
    why: str | None = None
    """Reason for the size, if the operator has chosen it."""


@dataclass(frozen=True)
class Progress:
    """Progress in the orchestrator's last report. None: unknown."""

    step: int | None = None
    total_steps: int | None = None
    policy_version: int | None = None
    reward: float | None = None
    loss: float | None = None
    """Loss of the last step, for runs without a reward (task SFT, on this machine)."""
    tokens_per_second: float | None = None
    staleness_mean: float | None = None
    sent_bytes: float | None = None
    """Transferred bytes of the newest version, if versions are sent as differences (on this machine)."""
    version_bytes: float | None = None
    """Bytes of the complete version."""
    last_step_time: str | None = None
    """Time of the last step (RFC 3339)."""
    eta_seconds: float | None = None
    checkpoint_step: int | None = None
    resumed_from_step: int | None = None
    steps_lost: int = 0


@dataclass(frozen=True)
class Wait:
    """Work that the next step waits for."""

    text: str
    """Text of the orchestrator."""
    role: str | None = None
    phase: str | None = None
    since: str | None = None
    """Start of the wait (RFC 3339)."""


MACHINE = "machine"
"""Role name for the hours of a run without GPUs on one machine."""


@dataclass(frozen=True)
class CostRow:
    """Time for which the GPUs of one role were allocated in one attempt."""

    attempt: int
    """Number of the attempt; 0: sum of all attempts before those with rows."""
    role: str
    seconds: tuple[tuple[str, int], ...]
    """Pairs of use and GPU-seconds; without GPUs, seconds of the machine."""


@dataclass(frozen=True)
class Start:
    """Duration from the start of an attempt to its first new step."""

    attempt: int
    seconds: tuple[tuple[str, float], ...]
    """Phases in order with their seconds, as in `status.lastRestart`; on this machine only the trainer's phases."""
    total: float | None = None
    """Sum of the seconds, or None if the step is not trained yet."""
    slow: str | None = None
    """Phases that exceeded their budgets, with the cause."""

    @property
    def text(self) -> str:
        """Text with the longest phases."""
        longest = sorted(self.seconds, key=lambda one: -one[1])[:_LONGEST]
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest if seconds >= 0.5)
        took = "has no new step yet" if self.total is None else f"took {self.total:.0f} s to its first new step"
        return f"attempt {self.attempt} {took}" + (f": {parts}" if parts else "")


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one time."""

    place: Place
    name: str
    where: str
    """Namespace, or folder of the run."""
    task: str
    phase: str
    reason: str | None
    """Reason of the most important condition."""
    message: str | None
    attempt: int
    restarts: int
    restarts_counted: int
    max_restarts: int | None
    progress: Progress
    conditions: tuple[Condition, ...] = ()
    wait: Wait | None = None
    failures: tuple[Failure, ...] = ()
    """Failures, newest last."""
    events: tuple[Event, ...] = ()
    """Events, newest last."""
    processes: tuple[Process, ...] = ()
    roles: tuple[tuple[str, Role], ...] = ()
    heard_seconds: float | None = None
    """Seconds since the orchestrator's last report, or None."""
    next_retry_time: str | None = None
    started: str | None = None
    ended: str | None = None
    created: str | None = None
    excluded_nodes: tuple[str, ...] = ()
    defaults: str = ""
    """ConfigMap with the namespace's defaults, and the fields that the attempt got from it."""
    storage: str | None = None
    """Name and size of the claim."""
    forked_from: str | None = None
    """Run and step from which the run was forked."""
    folder: str | None = None
    """Path of the run's folder in its pods."""
    host: str | None = None
    """Run whose trainer this run shares."""
    start: Start | None = None
    """Startup of the attempt after the last restart; on this machine, of any attempt."""
    go_on: str | None = None
    """Command that continues a run on this machine."""
    results: tuple[str, ...] = ()
    """Results of an evaluation."""
    cost: tuple[CostRow, ...] = ()
    """GPU time; for a folder only if `gpu_cost.with_local_cost` has read it."""
    trained: tuple[tuple[str, int], ...] = ()
    """Tokens and samples that were trained in this time; empty if unknown."""
    gpus: tuple[tuple[str, GpuUse], ...] = ()
    """GPU use by role, while the run is active."""
    gpus_unknown: str | None = None
    """Reason why the GPU use of a run with GPUs is unknown."""
    budget: float | None = None
    """Budget of the run in GPU-hours."""
    unread: tuple[str, ...] = ()
    """Parts of the run that could not be read, each with the cause."""

    @property
    def title(self) -> str:
        """Name and location for people."""
        return f"{self.name} ({self.where})" if self.place == "folder" else f"{self.name} (namespace {self.where})"

    @property
    def argument(self) -> str:
        """Words that name the run on a command line, independent of the context's namespace."""
        return shlex.quote(self.where) if self.place == "folder" else f"{self.name} -n {self.where}"

    @property
    def gpu_hours(self) -> float:
        """Sum of `cost` in hours."""
        return sum(seconds for row in self.cost for _, seconds in row.seconds) / 3600

    def find_condition(self, kind: str) -> Condition | None:
        """Return the condition of a type, or None."""
        return next((one for one in self.conditions if one.type == kind), None)


def _largest(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else -value


SORT_FIELDS: Mapping[str, Callable[[Snapshot], str | float | None]] = {
    "name": lambda run: run.name,
    "phase": lambda run: run.phase,
    "step": lambda run: _largest(run.progress.step),
    "reward": lambda run: _largest(run.progress.reward),
    "restarts": lambda run: _largest(run.restarts),
    "age": lambda run: _largest(seconds_of(run.created or run.started)),
}
"""Fields by which runs can be sorted, with the key in ascending order; None for an unknown value."""


def sort_snapshots(runs: Sequence[Snapshot], field: str) -> list[Snapshot]:
    """Return runs sorted by a field of `SORT_FIELDS`; runs with an unknown value come last, equal ones keep their order."""
    key = SORT_FIELDS[field]
    known = [(found, run) for run in runs if (found := key(run)) is not None]
    return [run for _, run in sorted(known, key=lambda one: one[0])] + [run for run in runs if key(run) is None]
