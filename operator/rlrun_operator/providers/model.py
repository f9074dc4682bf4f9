"""Inputs and outputs of a decision for a queue of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlrun_operator.state import Admission, Json, Manifest


@dataclass(frozen=True)
class Flavor:
    """Fields of a ResourceFlavor that pods get."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Manifest, ...] = ()


@dataclass(frozen=True)
class Priority:
    """Priority of a run, with the class that it comes from."""

    value: int = 0
    group: str = ""
    """API group of the class."""
    kind: str = ""
    """Kind of the class; empty: the number is the run's own."""
    name: str = ""

    @property
    def reference(self) -> Json | None:
        """`spec.priorityClassRef`."""
        return {"group": self.group, "kind": self.kind, "name": self.name} if self.kind else None


@dataclass(frozen=True)
class Subject:
    """A run as its queue sees it."""

    name: str
    namespace: str
    uid: str
    queue: str
    """LocalQueue of Kueue, or Queue of Volcano."""
    pod_sets: tuple[Json, ...]
    """Needs of the next attempt, by role (`workload.pod_sets`, `volcano_queue.members_of`); none: the specification is invalid."""
    priority: Priority = Priority()
    holds: bool = False
    """Its admission is on record, it is on the way into suspension, or a pod of it exists, an ending one too, or what may make one."""
    has_pods: bool = False
    """A pod of it exists that has not ended, or what may make one."""
    begins: bool = True
    """No attempt is under way: the pods that come next are those of `pod_sets`."""
    engines: int = 0
    """Engines that it has now by its specification, but for spot engines: the one number that may change while it runs."""
    spot: int = 0
    """Spot engines, likewise."""
    suspended: bool = False
    """Its user has suspended it."""
    ready: bool = False
    """Trainer and orchestrator are ready, and as many engines as it needs."""
    over: Literal["Succeeded", "Failed"] | None = None
    """Outcome of a run that has ended."""
    outcome: str = ""
    """Words about it."""


@dataclass(frozen=True)
class Create:
    """POST of an object; one that exists is left as it is."""

    manifest: Manifest


@dataclass(frozen=True)
class Edit:
    """Merge patch of this very state of an object, its status apart."""

    patch: Manifest


@dataclass(frozen=True)
class PutStatus:
    """PUT of a whole status over this very state of an object: a merge patch with one condition would delete the others."""

    status: Manifest


@dataclass(frozen=True)
class Remove:
    """Deletion of this very object."""


Write = Create | Edit | PutStatus | Remove


@dataclass(frozen=True)
class Step:
    """Decision: the answer holds as things are, before the write; after it the next step is asked for."""

    answer: Admission
    write: Write | None = None
