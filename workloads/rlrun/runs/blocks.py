"""Typed parts of a specification for Python: `Run(name="a", model=Model(path="..."), trainer=Trainer(replicas=2))`.

Each class is the model of a manifest's block, with the same fields in snake_case. A wrong value is refused at once,
with field, value and fix. A mapping, `trainer={"replicas": 2}`, works too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlrun.api.lifecycle import FailurePolicySpec
from rlrun.api.placement import PlacementSpec
from rlrun.api.pods import InferenceBlock, OrchestratorBlock, TrainerBlock
from rlrun.api.storage import StorageSpec
from rlrun.config.base import Config
from rlrun.config.loading.examine import examine_layer
from rlrun.config.loading.layers import Reader
from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.data import DataConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.model import ModelConfig, TinyModelConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.policies import PoliciesConfig
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig, SamplingConfig
from rlrun.config.models.tracking import TrackingConfig
from rlrun.runs.errors import ManifestError
from rlrun.runs.plain import plain

if TYPE_CHECKING:
    _Block = type  # so that the fields of the models are the arguments
else:

    class _Block(type(Config)):
        """Metaclass of the blocks. Creation reports all problems like the manifest's reader, instead of pydantic's error."""

        def __call__(cls, **fields: Any) -> Any:
            layer = Reader(cls, cls.__name__, style="snake").read(plain(fields))
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
