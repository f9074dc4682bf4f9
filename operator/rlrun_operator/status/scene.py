"""Facts from which it is explained why a run waits: its pods, how many are wanted, its claim, events and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlrun.api.storage import ClaimTemplate
from rlrun_operator.names import Names, Role
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status.conditions import ConditionUpdate

TEXT_MAX = 600
"""Characters of what another component says, in one message."""


@dataclass(frozen=True)
class Wanted:
    """Wanted number of pods, and their common fields."""

    trainers: int
    engines: int
    engines_needed: int
    claim: str
    own_claim: bool
    """The operator made the claim."""
    spot: int = 0
    """Engines on interruptible nodes, counted in the engines."""

    def count(self, role: Role) -> int:
        """Pods that have to get a node; spot engines need not."""
        return {"trainer": self.trainers, "inference": self.engines - self.spot, "orchestrator": 1}[role]


@dataclass(frozen=True)
class Scene:
    """Inputs of an explanation."""

    names: Names
    wanted: Wanted
    pods: Sequence[Pod]
    """Pods of the current attempt (inference: all), ending ones left out."""
    claim: Manifest | None
    events: Sequence[Manifest]
    nodes: Sequence[Manifest] | None
    waiting_on: str | None
    """The orchestrator's own word."""
    trouble: ConditionUpdate | None = None
    """Report of the roles on a bound volume."""
    engines_refused: bool = False
    """The engines' controller says that it may not make a pod now. Events outlive what they tell of."""
    without: str = ""
    """Spot engines that are not ready, and why; empty: all are."""
    namespace: str = ""
    """Namespace of the run."""
    template: ClaimTemplate | None = None
    """Claim that the specification asks the operator to make."""
    born: float | None = None
    """Creation of the run, in seconds since the epoch."""
    tracker_secrets: Mapping[str, str] = field(default_factory=dict)
    """Field of the specification, such as tracking.wandb.secretRef, by the name of the Secret there."""

    def of(self, role: Role) -> list[Pod]:
        """Pods of a role that have to get a node."""
        return [pod for pod in self.pods if pod.role == role and not pod.spot]

    @property
    def engines(self) -> list[Pod]:
        """All engines."""
        return [pod for pod in self.pods if pod.role == "inference"]
