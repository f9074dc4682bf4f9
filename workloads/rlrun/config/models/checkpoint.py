"""Checkpoints on the run's volume, their copies in object storage, and the transfer of weights to the engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import Format, RunFolder
from rlrun.config.rule import Rule


class ResumeConfig(Config):
    """Starting point of an attempt."""

    policy: Literal["Latest", "Never", "Step"] = "Latest"
    """Latest: the newest complete checkpoint, or the model without one. Never: refuse a folder that holds a run. Step: the one at
    `step`."""
    step: Annotated[int, Field(ge=1)] | None = None
    """The checkpoint's step; set if and only if the policy is Step."""

    from_run: RunFolder | None = None
    """Another run, by name on the same volume or by folder, whose weights and optimizer state this run starts from at
    step 0; ignored once this run has a checkpoint."""
    from_step: Annotated[int, Field(ge=1)] | None = None
    """The other run's checkpoint; default: its newest complete one."""

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.policy == 'Step') == has(self.step)",
            "{has(self.step) ? 'step (' + string(self.step) + ') needs policy Step, policy is ' + self.policy"
            " + '; set policy to Step or remove step' : 'policy Step needs step; set step, or remove policy for the newest "
            "checkpoint'}",
            ".step",
        ),
        Rule(
            "has(self.fromRun) || !has(self.fromStep)",
            "fromStep ({self.fromStep}) is a step of another run: set fromRun, or step with policy Step",
            ".fromStep",
        ),
        Rule(
            "!has(self.fromRun) || self.policy != 'Step'",
            "policy Step starts from this run's own checkpoint, fromRun from another run's: set one of them",
            ".fromRun",
        ),
    )

    @model_validator(mode="after")
    def _step_of_a_run(self) -> Self:
        if self.from_step is not None and self.from_run is None:
            raise ValueError(
                f"fromStep ({self.from_step}) is a step of another run: set fromRun, or step with policy Step"
            )
        if self.from_run is not None and self.policy == "Step":
            raise ValueError(
                "policy Step starts from this run's own checkpoint, fromRun from another run's: set one of them"
            )
        return self

    @model_validator(mode="after")
    def _step_with_policy(self) -> Self:
        if (self.policy == "Step") != (self.step is not None):
            if self.step is None:
                raise ValueError("policy Step needs step; set step, or remove policy for the newest checkpoint")
            raise ValueError(
                f"step ({self.step}) needs policy Step, policy is {self.policy}; set policy to Step or remove step"
            )
        return self


class ExportConfig(Config):
    """Model folders that transformers and vLLM load, in `exports/` of the run's folder; they are never deleted."""

    interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between exports; default: none on the way."""
    at_end: bool = True
    """Export the model after the last step."""


class CheckpointConfig(Config):
    """Checkpoints of trainer and orchestrator together."""

    enabled: bool = True
    """Save checkpoints. Off: an interrupted run starts again."""
    interval: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints; the last step always makes one."""
    save_async: bool = True
    """Write checkpoints beside training, which waits only for the copy to host memory. Off: it waits for the files."""
    keep_last: Annotated[int, Field(ge=1)] = 3
    """Newest complete checkpoints that are kept."""
    keep_interval: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints at multiples of this step are kept for good."""
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 30
    """Longest time that a stopped run (SIGTERM, Ctrl-C) may take to save its last finished step, in seconds."""
    export: ExportConfig = ExportConfig()
    """Exports of the model."""
    resume: ResumeConfig = ResumeConfig()
    """Starting point of an attempt."""


class WeightSyncConfig(Config):
    """Weight sync: the transfer of new weights from the trainer to the engines."""

    transport: Literal["Filesystem", "NCCL"] = "Filesystem"
    """Filesystem: through the volume. NCCL: from GPU to GPU (gloo between CPUs) into the engines' `/dev/shm`; only checkpointed versions
    reach the volume."""
    deltas: Literal["Auto", "Never"] = "Never"
    """Auto: hand over what changed since the version before, wherever that is less than half of the new one. Each engine then keeps one
    whole version in `/dev/shm`. Adapters are always whole."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Deadline of one replica's update, in seconds; a late replica leaves the rotation and is tried again."""


MirrorURL = Annotated[
    str,
    Field(min_length=4, max_length=512),
    Format(
        r"[a-z][a-z0-9+]*://[^\s?#@]+",
        "an address such as s3://bucket/folder or gs://bucket/folder, without credentials: these come from the environment",
    ),
]


class MirrorConfig(Config):
    """Copies of what is complete on the volume, made beside the run."""

    url: MirrorURL
    """Folder in object storage, such as `s3://bucket/runs`; the run's is `<url>/<run>`. Credentials come from the orchestrator's
    environment (`orchestrator.envFrom`)."""
    checkpoints: bool = True
    """Copy checkpoints."""
    exports: bool = True
    """Copy exported models."""
    traces: bool = False
    """Copy the rollouts for people."""
