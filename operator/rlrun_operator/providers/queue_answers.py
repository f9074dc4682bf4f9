"""Inputs and outputs of a decision for an external queue, and the object of a run in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlrun_operator.names import GROUP, KIND, VERSION, child_labels
from rlrun_operator.state import Admission, Json, Manifest

SHAPE_ANNOTATION = f"{GROUP}/shape"
"""On a run's object: hash of the needs and the queue for which it was built."""
NAME_MAX = 63


@dataclass(frozen=True)
class Flavor:
    """Fields of a ResourceFlavor that are added to pods."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Manifest, ...] = ()


@dataclass(frozen=True)
class Priority:
    """Priority of a run, with the class that defines it."""

    value: int = 0
    group: str = ""
    """API group of the class."""
    kind: str = ""
    """Kind of the class; empty: the run sets the number itself."""
    name: str = ""

    @property
    def reference(self) -> Json | None:
        """Value of `spec.priorityClassRef`."""
        return {"group": self.group, "kind": self.kind, "name": self.name} if self.kind else None


@dataclass(frozen=True)
class QueuedRun:
    """View of a run for its queue."""

    name: str
    namespace: str
    uid: str
    queue: str
    """Name of its queue."""
    pod_sets: tuple[Json, ...]
    """Needs of the next attempt, by role (`QueueAdapter.render_needs`); empty: the specification is invalid."""
    priority: Priority = Priority()
    holds: bool = False
    """Whether its admission is recorded, it is being suspended, or any of its pods (also terminating ones) or pod controllers exist."""
    has_pods: bool = False
    """Whether it has a pod that has not ended, or a controller that may create one."""
    begins: bool = True
    """Whether no attempt is running, so that the next pods are those of `pod_sets`."""
    engines: int = 0
    """Current engines by its specification, without spot engines: the only number that may change while it runs."""
    spot: int = 0
    """Current spot engines by its specification."""
    suspended: bool = False
    """Whether its user has suspended it."""
    ready: bool = False
    """Whether trainer, orchestrator and enough engines are ready."""
    over: Literal["Succeeded", "Failed"] | None = None
    """Outcome of an ended run."""
    outcome: str = ""
    """Message about the outcome."""


@dataclass(frozen=True)
class Create:
    """POST of an object; an existing object is not changed."""

    manifest: Manifest


@dataclass(frozen=True)
class Edit:
    """Merge patch of an object without its status; it applies only to the observed version."""

    patch: Manifest


@dataclass(frozen=True)
class PutStatus:
    """PUT of a complete status, only over the observed version: a merge patch with one condition would delete the other conditions."""

    status: Manifest


@dataclass(frozen=True)
class Remove:
    """Deletion of an object; only the observed one, not a successor."""


Write = Create | Edit | PutStatus | Remove


@dataclass(frozen=True)
class Step:
    """Decision: an answer for the state before the write, and the write after which the next step is requested."""

    answer: Admission
    write: Write | None = None


def name_of(run: str, uid: str) -> str:
    """Return the name of a run's object in its queue, which is the same after a restart of the operator, so that a run never has two."""
    mark = hashlib.sha256(uid.encode()).hexdigest()[:8]
    return f"rlrun-{run[: NAME_MAX - len('rlrun--') - len(mark)].rstrip('-')}-{mark}"


def queue_object(
    run: QueuedRun, api_version: str, kind: str, spec: Json, *, shape: str, more_labels: Mapping[str, str] | None = None
) -> Json:
    """Return a run's object in an external queue: owned by the run, with the hash of its needs."""
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": run.name, "uid": run.uid, "controller": True}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name_of(run.name, run.uid),
            "namespace": run.namespace,
            "labels": {**child_labels(run.name), **(more_labels or {})},
            "annotations": {SHAPE_ANNOTATION: shape},
            "ownerReferences": [{**owner, "blockOwnerDeletion": False}],
        },
        "spec": spec,
    }


def is_of(run: QueuedRun, held: Manifest) -> bool:
    """Return whether the run is the controller of an object."""
    owners = held["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") is True and owner.get("uid") == run.uid for owner in owners)


def refused_answer(reason: str, message: str, *, stops: bool = False) -> Admission:
    """Return the answer that a run may have no pods."""
    return Admission(False, reason, message, stops=stops)
