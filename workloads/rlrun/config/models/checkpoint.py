"""Checkpoints on the run's volume, their copies in object storage, and the transfer of weights to the engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config, Rule
from rlrun.config.formats import Format, RunFolder


class ResumeConfig(Config):
    """Starting point of an attempt."""

    policy: Literal["Latest", "Never", "Step"] = "Latest"
    """Latest: the newest complete checkpoint, or the model if there are no checkpoints. Never: refuse a folder that contains a run.
    Step: the checkpoint at `step`."""
    step: Annotated[int, Field(ge=1)] | None = None
    """Step of the checkpoint to start from. Required by policy Step and refused otherwise."""

    from_run: RunFolder | None = None
    """Another run, by name on the same volume or by folder. This run starts from its weights and optimizer state at step 0.
    Ignored once this run has its own checkpoint."""
    from_step: Annotated[int, Field(ge=1)] | None = None
    """Step of the other run's checkpoint. Default: its newest complete checkpoint."""

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
            "policy Step starts from this run's own checkpoint and fromRun from another run's: set only one of them",
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
                "policy Step starts from this run's own checkpoint and fromRun from another run's: set only one of them"
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
    """Exported model folders, in `exports/` of the run's folder. transformers and vLLM can load them; they are never deleted."""

    interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between exports. Default: only the export at the end."""
    at_end: bool = True
    """Export the model after the last step."""


class CheckpointConfig(Config):
    """Checkpoints of the trainer together with the orchestrator."""

    enabled: bool = True
    """Save checkpoints. Off: an interrupted run restarts from step 0."""
    interval: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints. The last step is always saved."""
    save_async: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory. Off: training waits for the files."""
    keep_last: Annotated[int, Field(ge=1)] = 3
    """Number of newest complete checkpoints to keep."""
    keep_interval: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints at multiples of this step are never deleted."""
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 30
    """Longest time that a stopped run (SIGTERM, Ctrl-C) may take to save its last finished step, in seconds."""
    export: ExportConfig = ExportConfig()
    """Exports of the model."""
    resume: ResumeConfig = ResumeConfig()
    """Starting point of an attempt."""


class WeightSyncConfig(Config):
    """Weight sync: the transfer of new weights from the trainer to the engines."""

    transport: Literal["Filesystem", "NCCL"] = "Filesystem"
    """Filesystem: through the volume. NCCL: from GPU to GPU (gloo between CPUs) into the engines' `/dev/shm`; only checkpointed
    versions are written to the volume."""
    deltas: Literal["Auto", "Never"] = "Never"
    """Auto: transfer only the changed values if they are less than half of the new version. Each engine then keeps one full version
    in `/dev/shm`. Adapters are always transferred in full."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Deadline of one replica's update, in seconds. A late replica leaves the rotation and is updated later."""


MirrorURL = Annotated[
    str,
    Field(min_length=4, max_length=512),
    Format(
        r"[a-z][a-z0-9+]*://[^\s?#@]+",
        "an address such as s3://bucket/folder or gs://bucket/folder, without credentials (they come from the environment)",
    ),
]


class MirrorConfig(Config):
    """Copies of complete checkpoints and exports in object storage, written in the background."""

    url: MirrorURL
    """Folder in object storage, such as `s3://bucket/runs`; this run writes to `<url>/<run>`. Credentials come from the orchestrator's
    environment (`orchestrator.envFrom`)."""
    checkpoints: bool = True
    """Copy checkpoints."""
    exports: bool = True
    """Copy exported models."""
    traces: bool = False
    """Copy the human-readable traces of rollouts."""
