"""Fields of a run's specification, and the volume that all roles share.

The rules between the fields are in `resource`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.api.kubernetes_types import Capacity
from rlrun.api.lifecycle import (
    BudgetSpec,
    CleanupPolicySpec,
    FailurePolicySpec,
    NetworkPolicySpec,
    NodeLossSpec,
    ProgressSpec,
)
from rlrun.api.pod_fields import InferenceBlock, OrchestratorBlock, TrainerBlock
from rlrun.api.pod_placement import PlacementSpec, apply_allocation
from rlrun.config.base import Config, Rule, list_cel
from rlrun.config.formats import Format, ObjectName, OperatorName
from rlrun.config.models.checkpoint import CheckpointConfig, MirrorConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.language_models import ModelConfig, PoliciesConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import MAX_STEPS, SEED, SEQ_LEN, Task
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig
from rlrun.config.models.trackers import TrackingConfig

MountPath = Annotated[
    str,
    Field(min_length=2, max_length=512),
    Format(
        r"(/[A-Za-z0-9_][-A-Za-z0-9_.]*)+",
        "an absolute path such as /data: names of letters, digits, '-', '_' and '.', without '/' at the end",
    ),
]
RESERVED_PATHS = (
    *("/bin", "/boot", "/dev", "/etc", "/home/rlrun", "/lib", "/lib64", "/opt/rlrun"),
    *("/proc", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var/run"),
)
"""Folders of the image and of the pod: a volume there would hide them, or other programs would write into it."""
SubPath = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Format(
        r"[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*",
        "a folder of the volume such as team-a/runs: names of letters, digits, '-', '_' and '.', no '/' at its start or end",
    ),
]

AccessMode = Literal["ReadWriteOnce", "ReadWriteMany"]
"""Access modes of a claim. ReadWriteOncePod is excluded, because at least two pods share the volume."""


def _read_write_many() -> list[AccessMode]:
    return ["ReadWriteMany"]


class ClaimTemplate(Config):
    """A claim that the operator creates for the run."""

    storage_class_name: ObjectName | None = None
    """StorageClass. Default: the cluster's default StorageClass."""
    size: Capacity = "100Gi"
    """Requested capacity. It may grow at any time if the StorageClass allows it (`allowVolumeExpansion`)."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=2)] = Field(
        default_factory=_read_write_many
    )
    """ReadWriteMany: pods on several nodes. ReadWriteOnce: all pods on one node."""


class StorageSpec(Config):
    """The shared volume. Set `claimName` or `claimTemplate`, but not both. Default: a claim with the defaults of `claimTemplate`."""

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim in the run's namespace."""
    claim_template: ClaimTemplate | None = None
    """Create a claim named `<run>-data`; the default without `claimName`."""
    mount_path: MountPath = "/data"
    """Mount path in every pod; the run's folder is `<mountPath>/<run>`."""
    sub_path: SubPath | None = None
    """Folder of the volume to mount. Default: its root."""
    hub_cache: Literal["Run", "Volume"] = "Run"
    """Cache of hub models and data sets. Run: in the run's folder. Volume: on the volume, shared by all its runs."""
    mirror: MirrorConfig | None = None
    """Copies of checkpoints, exports and traces in object storage."""
    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """What happens to a claim from `claimTemplate` when the run is deleted."""

    @property
    def template(self) -> ClaimTemplate | None:
        """Claim that the operator creates, or None if `claimName` names an existing claim."""
        return None if self.claim_name is not None else self.claim_template or ClaimTemplate()

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.claimName) && has(self.claimTemplate))",
            "set only one of claimName ({self.claimName}) and claimTemplate: both select the run's volume",
        ),
        Rule(
            f"!{list_cel(RESERVED_PATHS)}.exists(path, (self.mountPath + '/').startsWith(path + '/') || "
            "(path + '/').startsWith(self.mountPath + '/'))",
            "mountPath ({self.mountPath}) overlaps a folder of the image or of the pod; choose another path such as /data",
            ".mountPath",
        ),
        Rule(
            "self.whenDeleted != 'Delete' || !has(self.claimName)",
            "whenDeleted (Delete) needs claimTemplate, because a claim that the run did not create is never deleted; remove it",
            ".whenDeleted",
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.claim_name is not None and self.claim_template is not None:
            raise ValueError(
                f"set only one of claimName ({self.claim_name}) and claimTemplate: both select the run's volume"
            )
        if any(_one_holds_the_other(self.mount_path, path) for path in RESERVED_PATHS):
            raise ValueError(
                f"mountPath ({self.mount_path}) overlaps a folder of the image or of the pod; choose another path such as /data"
            )
        if self.claim_name is not None and self.when_deleted == "Delete":
            raise ValueError(
                "whenDeleted (Delete) needs claimTemplate, because a claim that the run did not create is never deleted; remove it"
            )
        return self


def _one_holds_the_other(path: str, other: str) -> bool:
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


DEFAULT_STORAGE = StorageSpec(claim_template=ClaimTemplate())


_NO_ENVIRONMENTS: list[EnvironmentConfig] = []


class RunFields(Config):
    """Fields of the specification of a run."""

    task: Task = "RL"
    """RL learns from `environments`. SFT learns from `data`, without engines. Eval evaluates `policies`, without a trainer."""
    model: ModelConfig
    """Model that the run starts from."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] = MAX_STEPS
    """Optimizer steps of the run."""
    seq_len: Annotated[int, Field(ge=16, le=16_777_216)] = SEQ_LEN
    """Longest training sample (prompt and all turns), in tokens. Longer replies are truncated; tasks with longer prompts are skipped."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = SEED
    """Seed of all random number generators of the run."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The training objective, and how stale its data may be."""
    environments: Annotated[list[EnvironmentConfig], Field(max_length=64)] = _NO_ENVIRONMENTS
    """Sources of tasks and rewards; not for SFT."""
    data: DataConfig | None = None
    """Training data; only for SFT."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of tokens, for environments without their own sampling."""
    evaluation: EvaluationConfig | None = None
    """Held-out evaluation between steps, and the tasks of Eval. Default: no evaluation."""
    policies: PoliciesConfig | None = None
    """Policies to evaluate (task Eval). Default: the base model."""
    allocation: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Layout of engines and trainer in AReaL's grammar, such as `vllm:d4t2+fsdp:d8`. It sets their replicas, GPUs and parallelism."""
    trainer: TrainerBlock = TrainerBlock()
    """The trainer: a torchrun group that runs the optimizer."""
    inference: InferenceBlock = InferenceBlock()
    """The vLLM engines."""
    orchestrator: OrchestratorBlock = OrchestratorBlock()
    """The process that schedules rollouts, builds batches and controls the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Interval and retention of checkpoints, and the starting point of an attempt."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of new weights to the engines."""
    tracking: TrackingConfig | None = None
    """Trackers that record the run's metrics. Default: no tracker."""
    storage: StorageSpec = DEFAULT_STORAGE
    """Volume that the roles share. Default: a claim of 100 GiB from the cluster's default StorageClass."""
    placement: PlacementSpec = PlacementSpec()
    """Placement of the pods."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Restarts after failures."""
    node_loss: NodeLossSpec = NodeLossSpec()
    """Handling of lost nodes."""
    progress: ProgressSpec = ProgressSpec()
    """Detection of stalls, and the action that follows."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Network access of the pods."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Priority among waiting runs; the highest starts first. It may preempt runs with a lower priority, which are suspended."""
    queue_name: ObjectName | None = None
    """Kueue's LocalQueue for the run (default: label `kueue.x-k8s.io/queue-name`), or Volcano's Queue."""
    suspend: bool = False
    """Save, and delete all pods. Set it to false to continue."""
    managed_by: OperatorName | None = None
    """Name of the operator that manages the run. Default: any operator."""
    active_deadline_seconds: Annotated[int, Field(ge=1)] | None = None
    """Seconds after which the run saves and fails; suspended time does not count."""
    budget: BudgetSpec | None = None
    """Limit on the run's GPU time. Default: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] | None = None
    """Seconds after the run's end at which its child objects, except the volume, are deleted."""
    cleanup_policy: CleanupPolicySpec = CleanupPolicySpec()
    """Cleanup at the end of the run."""

    @model_validator(mode="before")
    @classmethod
    def _apply_allocation(cls, values: object) -> object:
        """Set the fields of `allocation` before any field is validated."""
        return apply_allocation(values) if isinstance(values, Mapping) else values
