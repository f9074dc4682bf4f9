"""Code that a configuration refers to, by field and value. This module imports no such code and reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlrun.config.algorithm.names import is_import_path
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import InferenceConfig, InferenceSpec, TrainerConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.config.models.run_config import RunConfig


@dataclass(frozen=True, order=True)
class NamedCode:
    """One field that refers to code."""

    field: str
    """Name of the field in the manifest, such as `algorithm.loss.name`."""
    value: str

    @property
    def text(self) -> str:
        """Field and value for messages."""
        return f"{self.field}: {self.value}"


def code_of_model(model: ModelConfig) -> Iterator[NamedCode]:
    """Yield the code of the model's repository, and the environment of a tiny model's warm-up."""
    if model.trust_remote_code:
        at = "" if model.revision is None else f" at {model.revision}"
        yield NamedCode("model.trustRemoteCode", f"true, of {model.path or model.name or 'the tiny model'}{at}")
    if model.class_ is not None:
        yield NamedCode("model.class", model.class_)
    if model.tiny is not None and model.tiny.warmup_environment is not None:
        yield from _code_of_environment_id("model.tiny.warmupEnvironment", model.tiny.warmup_environment)
        yield from _code_of_arguments("model.tiny.warmupArgs", model.tiny.warmup_args)


def code_of_algorithm(
    algorithm: AlgorithmConfig | EnvironmentAlgorithm, field: str = "algorithm"
) -> Iterator[NamedCode]:
    """Yield losses and advantages with an import path."""
    for kind in ("loss", "advantage"):
        part = getattr(algorithm, kind)
        if part is not None and is_import_path(part.name):
            yield NamedCode(f"{field}.{kind}.name", part.name)


def code_of_environments(environments: Iterable[EnvironmentConfig]) -> Iterator[NamedCode]:
    """Yield environments that are not built in, interpreters, and import paths among arguments, such as rewards."""
    for index, environment in enumerate(environments):
        field = f"environments[{index}]"
        yield from _code_of_environment_id(f"{field}.id", environment.id)
        if environment.python is not None:
            yield NamedCode(f"{field}.python", environment.python)
        yield from _code_of_arguments(f"{field}.args", environment.args)
        yield from code_of_algorithm(environment.algorithm, f"{field}.algorithm")


def code_of_engine(inference: InferenceSpec | None) -> Iterator[NamedCode]:
    """Yield the arguments of vLLM's server, many of which name plugins."""
    for index, argument in enumerate(() if inference is None else inference.extra_args):
        yield NamedCode(f"inference.extraArgs[{index}]", argument)


def code_of_trainer(trainer: TrainerConfig) -> list[NamedCode]:
    """Return the code that the trainer runs."""
    found = [*code_of_model(trainer.model), *code_of_algorithm(trainer.algorithm)]
    for name, own in trainer.environment_algorithms.items():
        found += code_of_algorithm(own, f"environments[{name}].algorithm")
    return found


def code_of_run(config: RunConfig) -> list[NamedCode]:
    """Return the code that the roles of a run execute, sorted."""
    found = {
        *code_of_trainer(config.trainer),
        *code_of_environments(config.orchestrator.environments),
        *code_of_engine(config.inference),
        *(code for role in _roles_of_field(config) for code in code_of_model(role.model)),
    }
    return sorted(found)


def _roles_of_field(config: RunConfig) -> Sequence[TrainerConfig | InferenceConfig]:
    return [role for role in (config.trainer, config.inference) if role is not None]


def _code_of_environment_id(field: str, id: str) -> Iterator[NamedCode]:
    if ":" in id:
        yield NamedCode(field, id)


def _code_of_arguments(field: str, value: object) -> Iterator[NamedCode]:
    """Yield import paths at any depth of an environment's arguments."""
    if isinstance(value, str) and is_import_path(value):
        yield NamedCode(field, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _code_of_arguments(f"{field}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _code_of_arguments(f"{field}[{index}]", item)
