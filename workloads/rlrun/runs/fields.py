"""Fields of a specification for `Run(...)` and `Run.set(...)`. A test compares them with the fields of the resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

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
from rlrun.api.storage import StorageSpec
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.model import ModelConfig
from rlrun.config.models.policies import PoliciesConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig
from rlrun.config.models.tracking import TrackingConfig


class SpecFields(TypedDict, total=False):
    """Fields of a run's specification; blocks are models (see `blocks`) or mappings. In `Run.set`, None removes a
    field.
    """

    task: Literal["RL", "SFT", "Eval"] | None
    model: ModelConfig | Mapping[str, Any] | None
    max_steps: int | None
    seq_len: int | None
    seed: int | None
    algorithm: AlgorithmConfig | Mapping[str, Any] | None
    environments: Sequence[EnvironmentConfig | Mapping[str, Any]] | None
    data: DataConfig | Mapping[str, Any] | None
    sampling: SamplingConfig | Mapping[str, Any] | None
    evaluation: EvaluationConfig | Mapping[str, Any] | None
    policies: PoliciesConfig | Mapping[str, Any] | None
    allocation: str | None
    trainer: TrainerBlock | Mapping[str, Any] | None
    inference: InferenceBlock | Mapping[str, Any] | None
    orchestrator: OrchestratorBlock | Mapping[str, Any] | None
    checkpoint: CheckpointConfig | Mapping[str, Any] | None
    weight_sync: WeightSyncConfig | Mapping[str, Any] | None
    tracking: TrackingConfig | Mapping[str, Any] | None
    storage: StorageSpec | Mapping[str, Any] | None
    placement: PlacementSpec | Mapping[str, Any] | None
    failure_policy: FailurePolicySpec | Mapping[str, Any] | None
    node_loss: NodeLossSpec | Mapping[str, Any] | None
    progress: ProgressSpec | Mapping[str, Any] | None
    network_policy: NetworkPolicySpec | Mapping[str, Any] | None
    priority: int | None
    queue_name: str | None
    suspend: bool | None
    managed_by: str | None
    active_deadline_seconds: int | None
    budget: BudgetSpec | Mapping[str, Any] | None
    ttl_seconds_after_finished: int | None
    cleanup_policy: CleanupPolicySpec | Mapping[str, Any] | None
