"""Inputs and outputs of admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from rlrun_operator.names import Role
from rlrun_operator.state import Manifest

Amounts = Mapping[str, float]
"""Resources by name, in their base unit."""
Stage = Literal["waiting", "holding", "leaving"]
"""waiting: ready to start; holding: admitted; leaving: admitted before, and its pods are being removed."""
Preemption = Literal["PriorityAndShare", "Priority", "Never"]
Reason = Literal[
    "RoomFound",
    "WaitingForResources",
    "WaitingForTurn",
    "NeverFits",
    "BackingOff",
    "Preempted",
    "Released",
]


@dataclass(frozen=True, eq=False)
class PodSet:
    """Identical pods of one role."""

    role: Role
    count: int
    requests: Amounts
    """Requests of one pod."""
    spec: Manifest = field(default_factory=dict)
    """Selectors, tolerations and node affinity of one pod."""
    together: tuple[str, ...] = ()
    """Node labels whose value all pods of the gang with this label must share."""
    apart: bool = False
    """Whether each pod needs its own node."""
    least: int | None = None
    """Minimum number for an admitted run to continue; None: all. Engines that are added later have no guaranteed room."""


@dataclass(frozen=True)
class HeldPod:
    """Existing pod of a run."""

    role: Role
    node: str | None
    """Node of the pod; None: unscheduled."""
    requests: Amounts
    ending: bool = False
    """Whether its deletion was requested; it holds its resources until it is gone."""
    spot: bool = False
    """Whether it is an engine on an interruptible node: it holds resources, but does not belong to the gang."""


@dataclass(frozen=True)
class Applicant:
    """Run that requests or holds resources."""

    uid: str
    namespace: str
    name: str
    gang: tuple[PodSet, ...]
    stage: Stage
    since: float
    """Time of its first request, in seconds; a preempted run keeps it."""
    priority: int = 0
    started: float = 0.0
    """Time of the last admission."""
    pods: tuple[HeldPod, ...] = ()
    sizes: tuple[int, ...] = ()
    """Possible numbers of trainer pods of an elastic run, ascending; empty: only that of the gang."""

    def sized(self, trainers: int) -> Applicant:
        """Return the run with another number of trainer pods."""
        gang = tuple(replace(pods, count=trainers) if pods.role == "trainer" else pods for pods in self.gang)
        return replace(self, gang=gang)

    @property
    def trainers(self) -> int:
        """Number of trainer pods of the gang."""
        return sum(pods.count for pods in self.gang if pods.role == "trainer")

    @property
    def smallest_size(self) -> Applicant:
        """The run with its minimum number of trainer pods."""
        return self.sized(min(self.sizes[0], self.trainers)) if self.sizes else self

    @cached_property
    def total(self) -> dict[str, float]:
        """Requests of the whole gang."""
        return total_of(self.gang)


def total_of(gang: tuple[PodSet, ...]) -> dict[str, float]:
    """Return the requests of all pods of a gang."""
    total: dict[str, float] = {}
    for pods in gang:
        for name, amount in pods.requests.items():
            total[name] = total.get(name, 0.0) + pods.count * amount
    return total


@dataclass(frozen=True)
class Room:
    """A node, or the whole cluster as one room if only its total is known."""

    name: str
    total: Amounts
    """Allocatable resources."""
    others: Amounts = field(default_factory=dict)
    """Requests of pods that belong to no run of the queue."""
    node: Manifest | None = None
    """Node of the room; None: every pod qualifies, and pods that need separate nodes may share it."""


@dataclass(frozen=True)
class Capacity:
    """All rooms of the cluster."""

    rooms: tuple[Room, ...]
    noun: str = "node"
    """Word for one room in messages."""


@dataclass(frozen=True)
class QueueRules:
    """Settings of admission; times in seconds."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a namespace's share; the default is 1."""
    preemption: Preemption = "PriorityAndShare"
    pass_seconds: float = 300.0
    """Seconds during which later runs may pass the first one; afterwards resources are reserved for it."""
    reserve_seconds: float = 86400.0
    """Seconds for which a reservation lasts; if its run did not start, others pass it for the same time."""
    start_seconds: float = 600.0
    """Seconds within which all pods of an admitted run must have a node; otherwise it is released."""
    displaced_seconds: float = 60.0
    """The same if there is no room for its pods at all, for example after the loss of a node."""
    protect_seconds: float = 600.0
    """Seconds after an admission during which a run is not preempted for its namespace's share."""
    leave_seconds: float = 1800.0
    """Maximum seconds to wait for victims."""
    half_life_seconds: float = 21600.0
    """Half-life of past use in a namespace's share."""

    def weight_of(self, namespace: str) -> float:
        """Return the weight of a namespace."""
        return self.weights.get(namespace, 1.0)


@dataclass(frozen=True)
class Reservation:
    """Resources that are reserved for one run."""

    uid: str
    amounts: Mapping[str, Amounts]
    """Reserved amounts by room."""
    since: float
    until: float
    victims: tuple[str, ...] = ()
    """UIDs of runs that release resources for it."""


@dataclass(frozen=True)
class QueueState:
    """State between two passes. Without it no run is admitted twice or lost; only the record of past use restarts."""

    at: float | None = None
    """Time of the last pass."""
    use: Mapping[str, float] = field(default_factory=dict)
    """Mean share of a namespace in the past, decayed."""
    granted: Mapping[str, float] = field(default_factory=dict)
    """Admitted runs that have not recorded their admission yet, with its time."""
    lacking: Mapping[str, float] = field(default_factory=dict)
    """Admitted runs whose pods do not all have a node, with the time since."""
    stopping: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)
    """Runs that must release their resources and have not recorded it yet, with reason and message."""
    tries: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Released runs: number of releases, and time until which they wait."""
    reservation: Reservation | None = None
    sized: Mapping[str, int] = field(default_factory=dict)
    """Runs of `granted` with fewer trainer pods than requested, with the number."""
    rests: Mapping[str, float] = field(default_factory=dict)
    """Runs whose reservation expired, and the time until which they get no other one."""
    patient: Mapping[str, float] = field(default_factory=dict)
    """Elastic runs with room for fewer trainer pods that wait for leaving runs, with the time since."""


@dataclass(frozen=True)
class Verdict:
    """Answer for one run."""

    admitted: bool
    reason: Reason
    message: str
    position: int | None = None
    """Position in the queue, from 1; None: it does not wait."""
    waiting: int = 0
    """Number of waiting runs."""
    room: int | None = None
    """Number of trainer pods for which there is room; None: the run is not elastic, or the rooms are unknown."""

    @property
    def stops(self) -> bool:
        """Whether a run that holds resources must release them."""
        return self.reason in ("Preempted", "Released")


@dataclass(frozen=True)
class Plan:
    """Outcome of a pass."""

    verdicts: Mapping[str, Verdict]
    """Verdicts by UID of the run."""
    state: QueueState
