"""One look at a run, the same shape for a folder on this machine and for an RLRun in a cluster."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from rlrun.protocol.files.gpu_use import GpuUse

Place = Literal["folder", "cluster"]
_LONGEST = 6
"""Phases that a line names."""


@dataclass(frozen=True)
class Condition:
    """One aspect of the run, as in `status.conditions`."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str
    since: str | None = None
    """When the status changed last (RFC 3339)."""


@dataclass(frozen=True)
class Failure:
    """End of an attempt, as in `status.failures`."""

    attempt: int
    role: str
    process: str
    """Pod, or process on this machine."""
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
    """Phase of the pod, or why its container waits or ended."""
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
    """Reason for the number, where the operator has chosen it."""


@dataclass(frozen=True)
class Progress:
    """Progress as the orchestrator reported it last. None: not known."""

    step: int | None = None
    total_steps: int | None = None
    policy_version: int | None = None
    reward: float | None = None
    loss: float | None = None
    """Loss of the last step, where there is no reward (task SFT, on this machine)."""
    tokens_per_second: float | None = None
    staleness_mean: float | None = None
    sent_bytes: float | None = None
    """Bytes of the newest version as engines take it, where versions travel as what differs (on this machine)."""
    version_bytes: float | None = None
    """Bytes of that version as a whole."""
    last_step_time: str | None = None
    """RFC 3339."""
    eta_seconds: float | None = None
    checkpoint_step: int | None = None
    resumed_from_step: int | None = None
    steps_lost: int = 0


@dataclass(frozen=True)
class Wait:
    """Work that the next step waits for."""

    text: str
    """In words, as the orchestrator says it."""
    role: str | None = None
    phase: str | None = None
    since: str | None = None
    """RFC 3339."""


MACHINE = "machine"
"""Role of the hours of a run without GPUs on one machine."""


@dataclass(frozen=True)
class CostRow:
    """Time that the GPUs of one role were held in one attempt."""

    attempt: int
    """0: all attempts before those that have rows."""
    role: str
    seconds: tuple[tuple[str, int], ...]
    """Use, and GPU-seconds; on a machine without GPUs seconds of that."""


@dataclass(frozen=True)
class Start:
    """Time that an attempt took to its first new step."""

    attempt: int
    seconds: tuple[tuple[str, float], ...]
    """Phases in order, with their seconds: those of `status.lastRestart`, or of the trainer alone on this machine."""
    total: float | None = None
    """Seconds of all of them; None: the step is not trained yet."""
    slow: str | None = None
    """Phases beyond their budgets, and why."""

    @property
    def text(self) -> str:
        """The longest phases in words."""
        longest = sorted(self.seconds, key=lambda one: -one[1])[:_LONGEST]
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest if seconds >= 0.5)
        took = "has no new step yet" if self.total is None else f"took {self.total:.0f} s to its first new step"
        return f"attempt {self.attempt} {took}" + (f": {parts}" if parts else "")


@dataclass(frozen=True)
class Snapshot:
    """One look at a run."""

    place: Place
    name: str
    where: str
    """Namespace, or the run's folder."""
    task: str
    phase: str
    reason: str | None
    """Reason of the condition that matters most."""
    message: str | None
    attempt: int
    restarts: int
    restarts_counted: int
    max_restarts: int | None
    progress: Progress
    conditions: tuple[Condition, ...] = ()
    wait: Wait | None = None
    failures: tuple[Failure, ...] = ()
    """Newest last."""
    events: tuple[Event, ...] = ()
    """Newest last."""
    processes: tuple[Process, ...] = ()
    roles: tuple[tuple[str, Role], ...] = ()
    heard_seconds: float | None = None
    """Age of the orchestrator's last word. None: there is none."""
    next_retry_time: str | None = None
    started: str | None = None
    ended: str | None = None
    created: str | None = None
    excluded_nodes: tuple[str, ...] = ()
    defaults: str = ""
    """ConfigMap with defaults of the namespace, and the fields that the attempt has from it."""
    storage: str | None = None
    """Claim and its size."""
    forked_from: str | None = None
    """Run and step that the run was forked from."""
    folder: str | None = None
    """The run's folder as its pods see it."""
    host: str | None = None
    """Run whose trainer this one uses."""
    start: Start | None = None
    """Start of the attempt that a restart began; on this machine of any attempt."""
    go_on: str | None = None
    """Command that goes on with a run on this machine."""
    results: tuple[str, ...] = ()
    """Measures of an evaluation."""
    cost: tuple[CostRow, ...] = ()
    """GPU time: in a cluster, and of a folder where `cost.account.with_local_cost` has read it."""
    trained: tuple[tuple[str, int], ...] = ()
    """Tokens and samples that were trained in this time; empty: none, or not known."""
    gpus: tuple[tuple[str, GpuUse], ...] = ()
    """Use of each role's GPUs, while the run goes on."""
    gpus_unknown: str | None = None
    """Why a run that has GPUs does not show their use; None: it does, or has none."""
    budget: float | None = None
    """GPU-hours that the run may cost."""
    unread: tuple[str, ...] = ()
    """Parts of the run that could not be read, each with the cause."""

    @property
    def title(self) -> str:
        """Name and place for people."""
        return f"{self.name} ({self.where})" if self.place == "folder" else f"{self.name} (namespace {self.where})"

    @property
    def argument(self) -> str:
        """Words that name the run on a command line, whatever the namespace of the context is."""
        return shlex.quote(self.where) if self.place == "folder" else f"{self.name} -n {self.where}"

    @property
    def gpu_hours(self) -> float:
        """All GPU time of `cost`."""
        return sum(seconds for row in self.cost for _, seconds in row.seconds) / 3600

    def condition(self, kind: str) -> Condition | None:
        """The condition of a type."""
        return next((one for one in self.conditions if one.type == kind), None)
