"""Fields and typed parts of a specification for Python, and the errors of `Run`.

An error is one message for people, without a traceback of internal calls in a notebook.

A test compares the fields of `Run(...)` and `Run.set(...)` with the fields of the resource. Each typed part is the
model of a manifest's block, with the same fields in snake_case:

    Run(name="a", model=Model(path="..."), trainer=Trainer(replicas=2))

A wrong value is refused at once, with field, value and fix. A mapping, `trainer={"replicas": 2}`, works too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from pydantic import BaseModel

from rlrun.api.lifecycle import (
    BudgetSpec,
    CleanupPolicySpec,
    FailurePolicySpec,
    NetworkPolicySpec,
    NodeLossSpec,
    ProgressSpec,
)
from rlrun.api.pod_fields import InferenceBlock, OrchestratorBlock, TrainerBlock
from rlrun.api.pod_placement import PlacementSpec
from rlrun.api.run_fields import StorageSpec
from rlrun.config.base import Config
from rlrun.config.loading.examine import examine_layer
from rlrun.config.loading.layers import Reader
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.language_models import LoRAConfig, ModelConfig, PoliciesConfig, TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig
from rlrun.config.models.trackers import TrackingConfig
from rlrun.inspect.kubectl import ClusterError
from rlrun.inspect.run_changes import WordError
from rlrun.inspect.source import NotFoundError

P = ParamSpec("P")
T = TypeVar("T")


class RunError(Exception):
    """Base of all errors of a `Run`."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ManifestError(RunError, ValueError):
    """Error for an invalid manifest.

    Args:
        problems: problems with field, value and fix.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)


class RunFailedError(RunError):
    """Error for a run that failed or stopped during a wait. The message is the text of `why()`."""


class WaitTimeoutError(RunError, TimeoutError):
    """Error for a wait that timed out; the run itself continues."""


def translate_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that errors of readers, the cluster and this machine become a `RunError`."""

    @wraps(call)
    def call_translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except ConfigError as error:
            raise ManifestError(error.problems) from None
        except (ClusterError, NotFoundError, WordError) as error:
            raise RunError(str(error)) from None
        except OSError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{error.filename or 'this machine'}: {error.strerror or error}") from None

    return call_translated


def plain_data(value: object) -> Any:
    """Convert models, mappings, sequences and paths to plain data. Of a model only the set fields are used."""
    if isinstance(value, BaseModel):
        return plain_data(
            {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
        )
    if isinstance(value, Mapping):
        return {str(name): plain_data(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(one) for one in value]
    return str(value) if isinstance(value, os.PathLike) else value


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


if TYPE_CHECKING:
    _Block = type  # so that the fields of the models are the arguments
else:

    class _Block(type(Config)):
        """Metaclass of the blocks. Creation reports all problems like the manifest's reader, instead of pydantic's error."""

        def __call__(cls, **fields: Any) -> Any:
            layer = Reader(cls, cls.__name__, style="snake").read(plain_data(fields))
            examined = examine_layer(cls, layer)
            if examined.problems or examined.result is None:
                raise ManifestError(examined.problems)
            return examined.result


class Model(ModelConfig, metaclass=_Block):
    """Block `model` of the manifest."""


class TinyModel(TinyModelConfig, metaclass=_Block):
    """Block `model.tiny` of the manifest."""


class Environment(EnvironmentConfig, metaclass=_Block):
    """Block `environments[]` of the manifest."""


class Sampling(SamplingConfig, metaclass=_Block):
    """Block `sampling` of the manifest."""


class Evaluation(EvaluationConfig, metaclass=_Block):
    """Block `evaluation` of the manifest."""


class Algorithm(AlgorithmConfig, metaclass=_Block):
    """Block `algorithm` of the manifest."""


class Optimizer(OptimizerConfig, metaclass=_Block):
    """Block `trainer.optimizer` of the manifest."""


class LoRA(LoRAConfig, metaclass=_Block):
    """Block `trainer.lora` of the manifest."""


class Parallelism(ParallelismConfig, metaclass=_Block):
    """Block `trainer.parallelism` of the manifest."""


class Trainer(TrainerBlock, metaclass=_Block):
    """Block `trainer` of the manifest."""


class Inference(InferenceBlock, metaclass=_Block):
    """Block `inference` of the manifest."""


class Orchestrator(OrchestratorBlock, metaclass=_Block):
    """Block `orchestrator` of the manifest."""


class Checkpoint(CheckpointConfig, metaclass=_Block):
    """Block `checkpoint` of the manifest."""


class WeightSync(WeightSyncConfig, metaclass=_Block):
    """Block `weightSync` of the manifest."""


class Data(DataConfig, metaclass=_Block):
    """Block `data` of the manifest."""


class Policies(PoliciesConfig, metaclass=_Block):
    """Block `policies` of the manifest."""


class Tracking(TrackingConfig, metaclass=_Block):
    """Block `tracking` of the manifest."""


class Storage(StorageSpec, metaclass=_Block):
    """Block `storage` of the manifest."""


class Placement(PlacementSpec, metaclass=_Block):
    """Block `placement` of the manifest."""


class FailurePolicy(FailurePolicySpec, metaclass=_Block):
    """Block `failurePolicy` of the manifest."""
