"""Lifecycle of a run: restarts after failures, cleanup, budget, and the network access of its pods."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config, FreeMapping, Rule
from rlrun.config.formats import PRINTABLE


class BackoffSpec(Config):
    """Delays between restarts. The first restart is immediate; the next delays start at `initialSeconds` and double up to `maxSeconds`."""

    initial_seconds: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Delay before the second restart, in seconds."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest delay, in seconds."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.initialSeconds <= self.maxSeconds",
            "initialSeconds ({self.initialSeconds}) must be at most maxSeconds ({self.maxSeconds}); "
            "lower it or raise maxSeconds",
            ".initialSeconds",
        ),
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initialSeconds ({self.initial_seconds:g}) must be at most maxSeconds ({self.max_seconds:g}); lower it or raise maxSeconds"
            )
        return self


class BudgetSpec(Config):
    """Limit on the GPU time of a run."""

    gpu_hours: Annotated[float, Field(gt=0, le=10_000_000)]
    """GPU-hours of the run's pods over all attempts. At the limit the run saves and is suspended until the limit is raised."""


FailureReason = Literal[
    "CudaError",
    "CudaOutOfMemory",
    "ConfigurationError",
    "ContainerConfigInvalid",
    "ContainerFailing",
    "DataError",
    "ExitCode",
    "ImagePullFailed",
    "Killed",
    "MountFailed",
    "NcclError",
    "NoProgress",
    "NodeLost",
    "OOMKilled",
    "PermanentError",
    "PodDeleted",
    "PodEvicted",
    "PodFailed",
    "PodReplaced",
    "ReferenceNotFound",
    "StorageError",
]
"""Failure reasons that a rule may name. The operator causes all other reasons itself."""


class FailureRule(Config):
    """Rule for failures that meet all its conditions. Without onExitCodes and onReasons it matches only failures that count."""

    name: Annotated[str, Field(min_length=1, max_length=63), PRINTABLE]
    """Name of the rule in messages."""
    action: Literal["FailRun", "Restart", "RestartUncounted"]
    """Action. Restart counts towards `maxRestarts`, RestartUncounted does not."""
    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=64)] | None = (
        None
    )
    """Exit codes of the failed container. Disrupted pods never match."""
    on_reasons: Annotated[list[FailureReason], Field(min_length=1, max_length=64)] | None = None
    """Failure reasons, as in `status.lastFailure`."""
    roles: (
        Annotated[list[Literal["trainer", "inference", "orchestrator"]], Field(min_length=1, max_length=3)] | None
    ) = None
    """Role of the first failed pod."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.onExitCodes) || has(self.onReasons) || has(self.roles)",
            "rule {self.name} has no condition; set onExitCodes, onReasons or roles, or all three roles to mean every failure",
        ),
    )

    @model_validator(mode="after")
    def _check_conditions(self) -> Self:
        if self.on_exit_codes is None and self.on_reasons is None and self.roles is None:
            raise ValueError(
                f"rule {self.name} has no condition; set onExitCodes, onReasons or roles, or all three roles to mean every failure"
            )
        return self


_RULE_TWICE = "self.rules.filter(r, !self.rules.exists_one(o, o.name == r.name))"


class FailurePolicySpec(Config):
    """Policy for failures. If a trainer pod or the orchestrator dies, the run restarts from its last complete checkpoint."""

    max_restarts: Annotated[int, Field(ge=0, le=10000)] = 3
    """Most restarts after failures; the next failure fails the run. Disruptions are not counted."""
    reset_after_steps: Annotated[int, Field(ge=1)] | None = None
    """Number of new steps after the last counted restart that resets the count."""
    backoff: BackoffSpec = BackoffSpec()
    """Delays between restarts."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = Field(default_factory=list)
    """Rules; the first match decides, otherwise the built-in rules do."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.rules) || {_RULE_TWICE}.size() == 0",
            f"several rules have the name {{{_RULE_TWICE}[0].name}}; give each rule its own rules[].name",
            ".rules",
        ),
    )

    @model_validator(mode="after")
    def _named_apart(self) -> Self:
        names = [rule.name for rule in self.rules]
        for index, name in enumerate(names):
            if names.index(name) != index:
                raise ValueError(f"several rules have the name {name}; give each rule its own rules[].name")
        return self


class NodeLossSpec(Config):
    """Nodes that do not respond."""

    force_delete_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    """Seconds after which an ended attempt's pods on such a node are deleted by force."""


Cleanup = Literal["GPU", "All", "None"]


class CleanupPolicySpec(Config):
    """Cleanup at the end of the run. GPU: delete trainer and engines; All: also the orchestrator's pod with its log; None: keep all."""

    on_complete: Cleanup = "GPU"
    """Cleanup after Complete."""
    on_failure: Cleanup = "GPU"
    """Cleanup after Failed. None keeps the pods, and their GPUs, for debugging."""


class ProgressSpec(Config):
    """Detection of stalls, and the action that follows."""

    startup_deadline_seconds: Annotated[int, Field(ge=1, le=604800)] = 1800
    """Longest time from the scheduling of all pods to the attempt's first step, in seconds."""
    deadline_seconds: Annotated[int, Field(ge=1, le=604800)] = 1800
    """Longest time without progress in a step, in seconds."""
    action: Literal["Restart", "Fail", "Report"] = "Restart"
    """Action. Restart counts towards `failurePolicy.maxRestarts`; Report only sets the condition Progressing."""


class NetworkPolicySpec(Config):
    """Network access of the run's pods."""

    mode: Literal["Restricted", "None"] = "Restricted"
    """Restricted: each role reaches only its peers, DNS, API server, hub, trackers and reward servers. None: no NetworkPolicy."""
    extra_egress: Annotated[list[FreeMapping], Field(max_length=32)] = Field(default_factory=list)
    """Additional egress rules of the NetworkPolicy, such as a rule for a proxy or for a mirror of the hub."""
