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
"""waiting: it wants to begin; holding: it was admitted; leaving: it was, and its pods are being removed."""
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
    """Equal pods of one role."""

    role: Role
    count: int
    requests: Amounts
    """Requests of one pod."""
    spec: Manifest = field(default_factory=dict)
    """Selectors, tolerations and node affinity of one pod."""
    together: tuple[str, ...] = ()
    """Node labels of which all pods of the gang that have them here share the value."""
    apart: bool = False
    """At most one of them on a node."""
    least: int | None = None
    """Number with which an admitted run goes on; None: all. Engines that are added later have no room of their own by right."""


@dataclass(frozen=True)
class HeldPod:
    """A pod of a run as it is in the cluster."""

    role: Role
    node: str | None
    """None: it has none yet."""
    requests: Amounts
    ending: bool = False
    """Its deletion was asked for; it holds its room until it is gone."""
    spot: bool = False
    """An engine on an interruptible node: it holds room, and is no part of the gang."""


@dataclass(frozen=True)
class Applicant:
    """A run that wants room, or has some."""

    uid: str
    namespace: str
    name: str
    gang: tuple[PodSet, ...]
    stage: Stage
    since: float
    """Time at which it asked first, in seconds; a run that was preempted keeps it."""
    priority: int = 0
    started: float = 0.0
    """Time of the last admission."""
    pods: tuple[HeldPod, ...] = ()
    sizes: tuple[int, ...] = ()
    """Numbers of trainer pods that an elastic run may have, ascending; empty: that of the gang alone."""

    def sized(self, trainers: int) -> Applicant:
        """The run with another number of trainer pods."""
        gang = tuple(replace(pods, count=trainers) if pods.role == "trainer" else pods for pods in self.gang)
        return replace(self, gang=gang)

    @property
    def trainers(self) -> int:
        """Number of trainer pods of the gang."""
        return sum(pods.count for pods in self.gang if pods.role == "trainer")

    @property
    def smallest(self) -> Applicant:
        """The run with the fewest trainer pods that it may have."""
        return self.sized(min(self.sizes[0], self.trainers)) if self.sizes else self

    @cached_property
    def total(self) -> dict[str, float]:
        """Requests of the whole gang."""
        return total_of(self.gang)


def total_of(gang: tuple[PodSet, ...]) -> dict[str, float]:
    """Requests of all pods of a gang."""
    total: dict[str, float] = {}
    for pods in gang:
        for name, amount in pods.requests.items():
            total[name] = total.get(name, 0.0) + pods.count * amount
    return total


@dataclass(frozen=True)
class Room:
    """A node, or the whole cluster as one where only its total is known."""

    name: str
    total: Amounts
    """Allocatable resources."""
    others: Amounts = field(default_factory=dict)
    """Requests of pods that are of no run of the queue."""
    node: Manifest | None = None
    """None: every pod qualifies, and several pods need no two of them."""


@dataclass(frozen=True)
class Capacity:
    """All rooms of the cluster."""

    rooms: tuple[Room, ...]
    noun: str = "node"
    """Name of one room in messages."""


@dataclass(frozen=True)
class QueueRules:
    """Settings of admission; times in seconds."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a namespace's share; 1 where none is given."""
    preemption: Preemption = "PriorityAndShare"
    pass_seconds: float = 300.0
    """Time for which later runs may pass the first one; then room is kept for it."""
    reserve_seconds: float = 86400.0
    """Time for which room is kept; if it did not begin, others pass it for as long."""
    start_seconds: float = 600.0
    """Time within which all pods of an admitted run have a node; else it is released."""
    displaced_seconds: float = 60.0
    """The same where there is no room for its pods at all, as after the loss of a node."""
    protect_seconds: float = 600.0
    """Time from an admission in which a run is not preempted for its namespace's share."""
    leave_seconds: float = 1800.0
    """Longest time that victims are waited for."""
    half_life_seconds: float = 21600.0
    """Time after which use counts half in a namespace's share."""

    def weight(self, namespace: str) -> float:
        """Weight of a namespace."""
        return self.weights.get(namespace, 1.0)


@dataclass(frozen=True)
class Reservation:
    """Room that is kept for one run."""

    uid: str
    amounts: Mapping[str, Amounts]
    """By room."""
    since: float
    until: float
    victims: tuple[str, ...] = ()
    """Runs that make room for it."""


@dataclass(frozen=True)
class QueueState:
    """Memory between two passes. Without it nothing is admitted twice or lost; use begins anew."""

    at: float | None = None
    """Time of the last pass."""
    use: Mapping[str, float] = field(default_factory=dict)
    """Mean share of a namespace in the past, decayed."""
    granted: Mapping[str, float] = field(default_factory=dict)
    """Runs that were admitted and did not say so yet, with the time."""
    lacking: Mapping[str, float] = field(default_factory=dict)
    """Admitted runs that lack pods with a node, with the time since."""
    stopping: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)
    """Runs that have to give their room back and did not say so yet, with reason and message."""
    tries: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Runs that were released: how often, and until when they wait."""
    reservation: Reservation | None = None
    sized: Mapping[str, int] = field(default_factory=dict)
    """Runs of `granted` that were given fewer trainer pods than they asked for, with the number."""
    rests: Mapping[str, float] = field(default_factory=dict)
    """Runs whose reservation ran out, and until when they get no other one."""
    patient: Mapping[str, float] = field(default_factory=dict)
    """Elastic runs that have room for fewer trainer pods and wait for runs that leave, with the time since."""


@dataclass(frozen=True)
class Verdict:
    """Answer for one run."""

    admitted: bool
    reason: Reason
    message: str
    position: int | None = None
    """Place in the queue, from 1; None: it does not wait."""
    waiting: int = 0
    """Number of runs that wait."""
    room: int | None = None
    """Number of trainer pods that an elastic run has room for; None: it has one size, or nobody knows."""

    @property
    def stops(self) -> bool:
        """True if a run that holds room has to give it back."""
        return self.reason in ("Preempted", "Released")


@dataclass(frozen=True)
class Plan:
    """Outcome of a pass."""

    verdicts: Mapping[str, Verdict]
    """By UID of the run."""
    state: QueueState
