"""How a run lives: what failures cost, and what its pods may talk to."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlrun.config.base import Config


class BackoffSpec(Config):
    """Waits between restarts. The first restart is at once; then `initialSeconds`, doubling up to `maxSeconds`."""

    initial_seconds: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Wait before the second restart, in seconds."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest wait, in seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initialSeconds ({self.initial_seconds:g}) must be at most maxSeconds ({self.max_seconds:g}); lower it or raise maxSeconds"
            )
        return self


class FailurePolicySpec(Config):
    """What happens when a trainer pod or the orchestrator dies: the whole run restarts from its last complete checkpoint."""

    max_restarts: Annotated[int, Field(ge=0, le=10000)] = 3
    """Restarts after failures; one more fails the run. Disruptions (deleted or preempted pods, lost nodes) do not count."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between restarts."""


class NetworkPolicySpec(Config):
    """What the run's pods may talk to."""

    mode: Literal["Restricted", "None"] = "Restricted"
    """Restricted: the run's own pods, DNS, the API server (orchestrator), and port 443 when the model comes from the hub.
    None: no policy."""
    extra_egress: Annotated[list[dict[str, JsonValue]], Field(max_length=32)] = Field(default_factory=list)
    """More egress rules, as in a Kubernetes NetworkPolicy, such as one for a judge's server."""
