"""The fields of a run's specification, without the rules between them, which `resource` has."""

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
    """Specification of the run, field by field."""

    task: Task = "RL"
    """RL learns from `environments`, SFT from `data`, without engines. Eval measures `policies`, without a trainer."""
    model: ModelConfig
    """The policy that the run starts from."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] = MAX_STEPS
    """Optimizer steps of the whole run."""
    seq_len: Annotated[int, Field(ge=16, le=16_777_216)] = SEQ_LEN
    """Longest training sample (prompt and all turns), in tokens; longer replies are cut, and tasks with a longer prompt left out."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = SEED
    """Seed of everything random in the run."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The objective and how far behind the policy its data may be."""
    environments: Annotated[list[EnvironmentConfig], Field(max_length=64)] = _NO_ENVIRONMENTS
    """Sources of tasks and rewards; not for SFT."""
    data: DataConfig | None = None
    """Training data; for SFT."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of tokens, unless an environment has its own."""
    evaluation: EvaluationConfig | None = None
    """Held-out evaluation between steps, none by default; also Eval's tasks."""
    policies: PoliciesConfig | None = None
    """Policies to evaluate (task Eval); default: the base model."""
    allocation: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Engines and trainer in AReaL's grammar, such as `vllm:d4t2+fsdp:d8`; stands for their replicas, GPUs and parallelism."""
    trainer: TrainerBlock = TrainerBlock()
    """The torchrun group that steps the optimizer."""
    inference: InferenceBlock = InferenceBlock()
    """The vLLM engines."""
    orchestrator: OrchestratorBlock = OrchestratorBlock()
    """The process that makes rollouts, batches and decisions."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, what to keep, where to start."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Transfer of new weights to the engines."""
    tracking: TrackingConfig | None = None
    """Trackers that show the run's curves; default: none."""
    storage: StorageSpec = DEFAULT_STORAGE
    """The volume that the roles share; default: a claim of 100 GiB from the cluster's default StorageClass."""
    placement: PlacementSpec = PlacementSpec()
    """Placement of the pods."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Restarts after failures."""
    node_loss: NodeLossSpec = NodeLossSpec()
    """Handling of lost nodes."""
    progress: ProgressSpec = ProgressSpec()
    """Detection of stalls, and the action."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Network access of the pods."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Place among the runs that wait: the highest first. It may take room from lower ones, which are suspended."""
    queue_name: ObjectName | None = None
    """Kueue's LocalQueue for the run (default: label `kueue.x-k8s.io/queue-name`), or Volcano's Queue."""
    suspend: bool = False
    """Save and remove all pods; false again: go on."""
    managed_by: OperatorName | None = None
    """The operator that looks after the run; default: any."""
    active_deadline_seconds: Annotated[int, Field(ge=1)] | None = None
    """Save and fail after this time, suspension not counted."""
    budget: BudgetSpec | None = None
    """Limit on the run's GPU time; default: none."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] | None = None
    """Delete the children of an ended run after this time, but the volume."""
    cleanup_policy: CleanupPolicySpec = CleanupPolicySpec()
    """Cleanup at the run's end."""

    @model_validator(mode="before")
    @classmethod
    def _allocate(cls, values: object) -> object:
        """The fields that `allocation` stands for, before any is judged."""
        return apply_allocation(values) if isinstance(values, Mapping) else values
