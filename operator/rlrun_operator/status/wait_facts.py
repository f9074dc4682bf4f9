"""Facts that explain why a run waits: events, pods, wanted numbers, claim and nodes, and common texts of messages.

Events are found by the object that they are about. The common texts are the units of a run's progress, which depend on its task, and the
queue's message before its first answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlrun.api.run_fields import ClaimTemplate
from rlrun_operator.names import Names, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.times import seconds_of


def newest_event(
    events: Sequence[Manifest], kind: str, name: str, reason: str | None = None, uid: str | None = None
) -> Manifest | None:
    """Return the latest event about an object, or None. A `name` that ends in '-' is a prefix (a ReplicaSet's name has a hash).

    `uid` limits the search to one object: pods of a StatefulSet reuse the names of earlier pods, and events outlive their pods.
    """
    found = [
        event for event in events if is_about_object(event, kind, name, uid) and reason in (None, event.get("reason"))
    ]
    return max(found, key=event_time, default=None)


def is_about_object(event: Manifest, kind: str, name: str, uid: str | None) -> bool:
    """Return whether an event is about the object; see `newest_event` for `name` and `uid`."""
    target: Manifest = event.get("involvedObject") or event.get("regarding") or {}
    known = str(target.get("name", ""))
    if target.get("kind") != kind or not (known.startswith(name) if name.endswith("-") else known == name):
        return False
    return uid is None or target.get("uid") in (None, uid)


def event_time(event: Manifest) -> float:
    """Return when an event was last observed, in seconds since the epoch, or 0 if it has no time."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    return next((t for text in times if (t := seconds_of(text)) is not None), 0.0)


@dataclass(frozen=True)
class ProgressTexts:
    """Texts for the progress of one task."""

    unit: str
    """Name of one unit of progress."""
    first: str
    """Name of the first unit of an attempt."""
    lacks: str
    """Predicate for a unit that has not come yet."""
    going: str
    """Clause while units are coming."""
    over: str
    """Clause for the end, when all units are complete."""


TRAINING = ProgressTexts("step", "first step", "is not done", "steps are trained", "all steps are trained")
ASKING = ProgressTexts("answer", "first answer", "has not come", "questions are answered", "every policy is measured")
QUEUE_LOOKS_SOON = "the queue has not considered the run yet"
"""Message of Admitted until the queue has answered."""


TEXT_MAX = 600
"""Maximum length, in characters, of another component's text within one message."""


@dataclass(frozen=True)
class Wanted:
    """Wanted number of pods, and their common fields."""

    trainers: int
    engines: int
    engines_needed: int
    claim: str
    own_claim: bool
    """Whether the operator created the claim."""
    spot: int = 0
    """Engines on interruptible nodes, included in `engines`."""

    def count(self, role: Role) -> int:
        """Return the number of pods that must get a node; spot engines are optional."""
        return {"trainer": self.trainers, "inference": self.engines - self.spot, "orchestrator": 1}[role]


@dataclass(frozen=True)
class Scene:
    """Inputs of a diagnosis."""

    names: Names
    wanted: Wanted
    pods: Sequence[Pod]
    """Pods of the current attempt (inference: of all attempts), without terminating ones."""
    claim: Manifest | None
    events: Sequence[Manifest]
    nodes: Sequence[Manifest] | None
    waiting_on: str | None
    """What the orchestrator waits for, as reported in its Lease."""
    trouble: ConditionUpdate | None = None
    """StorageReady as reported by the roles about a bound volume."""
    engines_refused: bool = False
    """Whether the engines' controller currently reports that it cannot create a pod. Its events outlive the cause."""
    without: str = ""
    """Spot engines that are not ready, with the cause; empty if all are ready."""
    namespace: str = ""
    """Namespace of the run."""
    template: ClaimTemplate | None = None
    """Template of the claim that the operator creates."""
    born: float | None = None
    """Creation time of the run, in seconds since the epoch."""
    tracker_secrets: Mapping[str, str] = field(default_factory=dict)
    """Field of the specification that names a Secret, such as tracking.wandb.secretRef, by the name of the Secret."""

    def pods_of_role(self, role: Role) -> list[Pod]:
        """Return the pods of a role that must get a node."""
        return [pod for pod in self.pods if pod.role == role and not pod.spot]

    @property
    def engines(self) -> list[Pod]:
        """All engine pods, including those on interruptible nodes."""
        return [pod for pod in self.pods if pod.role == "inference"]
