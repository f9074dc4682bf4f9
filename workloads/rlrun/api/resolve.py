"""Conversion of the resource into the roles' configuration by a pure function for `rlrun local`, `rlrun render` and the operator.

`fields_of_config` converts back, so that runs can be compared with the field names of the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlrun.api.field_rules import SFT_ALGORITHM_FIELDS
from rlrun.api.resource import RLRunSpec
from rlrun.config.base import Config, Fields
from rlrun.config.loading.schema import Shape, field_shapes, find_field, spell_name
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import (
    InferenceConfig,
    InferenceSpec,
    OrchestratorConfig,
    OrchestratorSpec,
    RoleConfig,
    TrainerConfig,
    TrainerSpec,
    micro_batch_tokens,
)
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.runtime.json_types import Json

ROLES = ("trainer", "inference", "orchestrator")
_TOP: Mapping[str, tuple[str, ...]] = {"mirror": ("storage", "mirror")}
"""Sections of `run.json` that do not belong to a role, with their path in the specification."""
_OF_OTHERS = frozenset({("inference", "lora"), ("orchestrator", "shared_with")})
"""Fields that a role gets from another role's block under the same name."""
_VARIABLES = ("env", "env_from")
"""Variables of a role's pods. Their values may be secrets, so they are not written into a run's folder."""


def resolve_spec(spec: RLRunSpec, *, name: str, uid: str, output_dir: str) -> RunConfig:
    """Fill the shared values into every role's configuration.

    Args:
        spec: valid specification.
        name: name of the run.
        uid: identifier that is unique over all runs that ever had this name.
        output_dir: folder of the run as the roles see it.
    """
    shared = RoleConfig(
        name=name,
        uid=uid,
        output_dir=output_dir,
        task=spec.task,
        model=spec.model,
        max_steps=spec.max_steps,
        seq_len=spec.seq_len,
        seed=spec.seed,
        colocated=spec.placement.colocate,
    )
    common = dict(shared)
    algorithm = _resolve_algorithm(spec)
    environments = [
        environment.model_copy(update={"sampling": environment.sampling or spec.sampling})
        for environment in spec.environments
    ]
    return RunConfig(
        trainer=TrainerConfig(
            **_resolve_trainer(spec),
            **common,
            algorithm=algorithm,
            environment_algorithms={
                environment.label: own
                for environment in environments
                if (own := environment.algorithm.trainer_part(algorithm))
            },
            checkpoint=spec.checkpoint,
            weight_sync=spec.weight_sync,
        ),
        inference=InferenceConfig(
            **_resolve_inference(spec),
            **common,
            lora=spec.trainer.lora,
            weight_sync=spec.weight_sync,
            return_routes=spec.trainer.router.replay == "Rollout",
        )
        if _has_engines(spec)
        else None,
        orchestrator=_resolve_orchestrator(spec, common, algorithm, environments),
        tracking=spec.tracking,
        mirror=spec.storage.mirror,
    )


def _resolve_algorithm(spec: RLRunSpec) -> AlgorithmConfig:
    if spec.task != "SFT":
        return spec.algorithm
    parts = {name: getattr(spec.algorithm, name) for name in SFT_ALGORITHM_FIELDS}
    return AlgorithmConfig(**parts | {"preset": "sft"})


def _resolve_trainer(spec: RLRunSpec) -> Fields:
    block = _computing_fields(spec.trainer, TrainerSpec)
    block["micro_batch_tokens"] = spec.trainer.micro_batch_tokens or micro_batch_tokens(spec.seq_len)
    return block


def _resolve_inference(spec: RLRunSpec) -> Fields:
    block = _computing_fields(spec.inference, InferenceSpec)
    block["max_model_len"] = spec.inference.max_model_len or spec.seq_len
    block["replicas"] = spec.trainer.replicas if spec.placement.colocate else spec.inference.min_replicas
    return block


def _resolve_orchestrator(
    spec: RLRunSpec, common: Fields, algorithm: AlgorithmConfig, environments: list[EnvironmentConfig]
) -> OrchestratorConfig:
    return OrchestratorConfig(
        **_computing_fields(spec.orchestrator, OrchestratorSpec),
        **common,
        algorithm=algorithm,
        environments=environments,
        data=spec.data,
        policies=spec.policies,
        sampling=spec.sampling,
        evaluation=spec.evaluation,
        checkpoint=spec.checkpoint,
        weight_sync=spec.weight_sync,
        shared_with=spec.trainer.shared_with,
        replay_routes=spec.trainer.router.replay == "Rollout",
        engine_parsers=spec.inference.parser_entries,
    )


def _has_engines(spec: RLRunSpec) -> bool:
    """Return whether the run has engines of its own."""
    return spec.task != "SFT" and spec.trainer.shared_with is None


def _computing_fields(block: Config, spec: type[Config]) -> Fields:
    """Return the fields of a role's block that affect its computation, without the fields of its pods."""
    return {name: getattr(block, name) for name in spec.model_fields}


def fields_of_spec(spec: Mapping[str, Any]) -> Json | None:
    """Return all fields of a specification that are set or have a default, or None if it is invalid.

    Args:
        spec: `spec` of a manifest from a file or from a cluster.
    """
    try:
        read = RLRunSpec.model_validate(dict(spec))
    except ValidationError:
        return None
    config = resolve_spec(read, name="compared", uid="compared", output_dir="runs/compared")
    left_out = {role: set(_VARIABLES) for role in ROLES}
    written = read.model_dump(mode="json", by_alias=True, exclude=left_out)
    return _laid_over(written, fields_of_config(config.model_dump(mode="json", by_alias=False)))


def fields_of_config(config: Mapping[str, Any]) -> Json:
    """Return the fields of a resolved configuration (`run.json`) with the manifest's names, without the fields of pods.

    Args:
        config: sections by name; unknown fields are ignored.
    """
    found: Json = {}
    root = Shape("model", model=RLRunSpec)
    for name in ("tracking", *_TOP):
        if config.get(name) is not None:
            _put_field(found, root, _TOP.get(name, (name,)), config[name])
    for role in ROLES:
        section = config.get(role)
        for name, value in section.items() if isinstance(section, Mapping) else ():
            if (role, name) in _OF_OTHERS:
                continue
            place = (name,) if find_field(RLRunSpec, name) is not None else (role, name)
            _put_field(found, root, place, value)
    shared = found.get("sampling")
    for environment in found.get("environments") or ():
        if isinstance(environment, dict) and environment.get("sampling") == shared:
            environment["sampling"] = None  # resolution copies the shared sampling into each environment
    return found


def computed_fields() -> frozenset[str]:
    """Return the fields that `run.json` can contain, as dotted paths. A path includes all fields below it."""
    sections: dict[str, type[Config]] = {
        "trainer": TrainerConfig, "inference": InferenceConfig, "orchestrator": OrchestratorConfig
    }  # fmt: skip
    found = {"tracking", *(".".join(place) for place in _TOP.values())}
    for role, section in sections.items():
        block = field_shapes(RLRunSpec)[role].model
        assert block is not None
        for name in section.model_fields:
            if find_field(RLRunSpec, name) is not None:
                found.add(spell_name(RLRunSpec, name, "camel"))
            elif find_field(block, name) is not None and (role, name) not in _OF_OTHERS:
                found.add(f"{role}.{spell_name(block, name, 'camel')}")
    return frozenset(found)


def _put_field(found: Json, shape: Shape, place: tuple[str, ...], value: object) -> None:
    """Set a field, given by its Python names, under the names of the manifest; unknown names are ignored."""
    table = found
    for at, name in enumerate(place):
        if shape.model is None or (known := find_field(shape.model, name)) is None:
            return
        alias, shape = spell_name(shape.model, known, "camel"), field_shapes(shape.model)[known]
        if at + 1 == len(place):
            table[alias] = _rename_fields(value, shape)
        else:
            table = table.setdefault(alias, {})


def _rename_fields(value: object, shape: Shape) -> object:
    if isinstance(value, Mapping) and shape.model is not None:
        found: Json = {}
        for name, inner in value.items():
            _put_field(found, shape, (str(name),), inner)
        return found
    if isinstance(value, Mapping) and shape.kind == "mapping":
        return {str(name): _rename_fields(inner, shape.parts[0]) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rename_fields(item, shape.parts[0]) if shape.kind == "list" else item for item in value]
    return value


def _laid_over(below: Json, above: Json) -> Json:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _laid_over(below[name], value) if both else value
    return merged
