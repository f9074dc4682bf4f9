"""Facts that explain why a run waits: its pods, the wanted numbers, its claim, events and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlrun.api.storage import ClaimTemplate
from rlrun_operator.names import Names, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status.conditions import ConditionUpdate

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
