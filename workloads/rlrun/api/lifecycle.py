"""Lifetime of a run: the cost of failures, removal at the end, and the network access of its pods."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import PRINTABLE
from rlrun.config.free import FreeMapping
from rlrun.config.rule import Rule


class BackoffSpec(Config):
    """Waits between restarts. The first restart is at once; then `initialSeconds`, doubling up to `maxSeconds`."""

    initial_seconds: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Wait before the second restart, in seconds."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Longest wait, in seconds."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.initialSeconds <= self.maxSeconds",
            "initialSeconds ({self.initialSeconds}) must be at most maxSeconds ({self.maxSeconds}); "
            "lower it or raise maxSeconds",
            ".initialSeconds",
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initialSeconds ({self.initial_seconds:g}) must be at most maxSeconds ({self.max_seconds:g}); lower it or raise maxSeconds"
            )
        return self


class BudgetSpec(Config):
    """Limit on what a run may cost."""

    gpu_hours: Annotated[float, Field(gt=0, le=10_000_000)]
    """GPU-hours of the run's pods, all attempts together; then it saves and is suspended, until this is raised."""


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
"""Reasons of failures that a rule may name; the rest is the operator's own doing."""


class FailureRule(Config):
    """Matches failures with all that is set, at least one condition; without codes and reasons, those that count anyway."""

    name: Annotated[str, Field(min_length=1, max_length=63), PRINTABLE]
    """Name in messages."""
    action: Literal["FailRun", "Restart", "RestartUncounted"]
    """Restart counts."""
    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=64)] | None = (
        None
    )
    """Exit codes, but not of disrupted pods."""
    on_reasons: Annotated[list[FailureReason], Field(min_length=1, max_length=64)] | None = None
    """Reasons, as in `status.lastFailure`."""
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
    def _conditional(self) -> Self:
        if self.on_exit_codes is None and self.on_reasons is None and self.roles is None:
            raise ValueError(
                f"rule {self.name} has no condition; set onExitCodes, onReasons or roles, or all three roles to mean every failure"
            )
        return self


_RULE_TWICE = "self.rules.filter(r, !self.rules.exists_one(o, o.name == r.name))"


class FailurePolicySpec(Config):
    """Policy for failures: when a trainer pod or the orchestrator dies, the whole run restarts from its last complete checkpoint."""

    max_restarts: Annotated[int, Field(ge=0, le=10000)] = 3
    """Restarts after failures; one more fails the run. Disruptions do not count."""
    reset_after_steps: Annotated[int, Field(ge=1)] | None = None
    """New steps after the last counted restart that reset the count."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between restarts."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = Field(default_factory=list)
    """The first that fits decides, else the built-in ones."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.rules) || {_RULE_TWICE}.size() == 0",
            f"several rules are called {{{_RULE_TWICE}[0].name}}; give each its own rules[].name",
            ".rules",
        ),
    )

    @model_validator(mode="after")
    def _named_apart(self) -> Self:
        names = [rule.name for rule in self.rules]
        for index, name in enumerate(names):
            if names.index(name) != index:
                raise ValueError(f"several rules are called {name}; give each its own rules[].name")
        return self


class NodeLossSpec(Config):
    """Nodes that do not answer."""

    force_delete_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    """An ended attempt's pods on such a node are removed by force after so long."""


Cleanup = Literal["GPU", "All", "None"]


class CleanupPolicySpec(Config):
    """Removal at the end of the run. GPU: trainer and engines; All: the orchestrator's pod, with its log, too; None: nothing."""

    on_complete: Cleanup = "GPU"
    """After Complete."""
    on_failure: Cleanup = "GPU"
    """After Failed. None keeps the pods, and their GPUs, to look into."""


class ProgressSpec(Config):
    """Detection of stalls, and the action that follows."""

    startup_deadline_seconds: Annotated[int, Field(ge=1, le=604800)] = 1800
    """Longest time from all pods scheduled to the attempt's first step."""
    deadline_seconds: Annotated[int, Field(ge=1, le=604800)] = 1800
    """Longest time without a step, or a part of one."""
    action: Literal["Restart", "Fail", "Report"] = "Restart"
    """Restart counts towards `failurePolicy.maxRestarts`; Report only sets the condition Progressing."""


class NetworkPolicySpec(Config):
    """Network access of the run's pods."""

    mode: Literal["Restricted", "None"] = "Restricted"
    """Restricted: each role reaches what it needs of the run, DNS, API server, hub, trackers and rewards' servers. None: no policy."""
    extra_egress: Annotated[list[FreeMapping], Field(max_length=32)] = Field(default_factory=list)
    """More egress rules of a NetworkPolicy, such as one for a proxy or a mirror of the hub."""
