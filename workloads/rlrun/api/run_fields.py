"""Fields of a run's specification. The rules between the fields are in `resource`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from rlrun.api.allocation import apply_allocation
from rlrun.api.lifecycle import (
    BudgetSpec,
    CleanupPolicySpec,
    FailurePolicySpec,
    NetworkPolicySpec,
    NodeLossSpec,
    ProgressSpec,
)
from rlrun.api.placement import PlacementSpec
from rlrun.api.pods import InferenceBlock, OrchestratorBlock, TrainerBlock
from rlrun.api.storage import DEFAULT_STORAGE, StorageSpec
from rlrun.config.base import Config
from rlrun.config.formats import ObjectName, OperatorName
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.policies import PoliciesConfig
from rlrun.config.models.roles import MAX_STEPS, SEED, SEQ_LEN, Task
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig
from rlrun.config.models.tracking import TrackingConfig

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
    def _allocate(cls, values: object) -> object:
        """Set the fields of `allocation` before any field is validated."""
        return apply_allocation(values) if isinstance(values, Mapping) else values
