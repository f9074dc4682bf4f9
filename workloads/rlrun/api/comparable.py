"""Fields of a run for a comparison: resolved, with all defaults, in the names of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlrun.api.resolve import resolve
from rlrun.api.resource import RLRunSpec
from rlrun.config.base import Config
from rlrun.config.loading.schema import Shape, fields, find_field, spelled
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, TrainerConfig
from rlrun.runtime.json_types import Json

ROLES = ("trainer", "inference", "orchestrator")
_TOP: Mapping[str, tuple[str, ...]] = {"mirror": ("storage", "mirror")}
"""Sections of `run.json` that are not a role's, by their place in the specification."""
_OF_OTHERS = frozenset({("inference", "lora"), ("orchestrator", "shared_with")})
"""Fields that a role gets from another role's block, which has them under this name, too."""
_VARIABLES = ("env", "env_from")
"""Variables of a role's pods: their values may be secrets, and a run's folder does not keep them."""


def fields_of_spec(spec: Mapping[str, Any]) -> Json | None:
    """All fields of a specification that are set or have a default; None if it is not a valid one.

    Args:
        spec: `spec` of a manifest, of a file or of a cluster.
    """
    try:
        read = RLRunSpec.model_validate(dict(spec))
    except ValidationError:
        return None
    config = resolve(read, name="compared", uid="compared", output_dir="runs/compared")
    left_out = {role: set(_VARIABLES) for role in ROLES}
    written = read.model_dump(mode="json", by_alias=True, exclude=left_out)
    return _laid_over(written, fields_of_config(config.model_dump(mode="json", by_alias=False)))


def fields_of_config(config: Mapping[str, Any]) -> Json:
    """Fields of a resolved configuration (`run.json`) in the manifest's names: what the run computes, without its pods.

    Args:
        config: sections by name. Unknown fields are left out.
    """
    found: Json = {}
    root = Shape("model", model=RLRunSpec)
    for name in ("tracking", *_TOP):
        if config.get(name) is not None:
            _put(found, root, _TOP.get(name, (name,)), config[name])
    for role in ROLES:
        section = config.get(role)
        for name, value in section.items() if isinstance(section, Mapping) else ():
            if (role, name) in _OF_OTHERS:
                continue
            place = (name,) if find_field(RLRunSpec, name) is not None else (role, name)
            _put(found, root, place, value)
    shared = found.get("sampling")
    for one in found.get("environments") or ():
        if isinstance(one, dict) and one.get("sampling") == shared:
            one["sampling"] = None  # resolution copies the shared sampling into each environment
    return found


def computed_fields() -> frozenset[str]:
    """Fields that `run.json` can hold, as dotted paths; the fields below each belong to it."""
    sections: dict[str, type[Config]] = {
        "trainer": TrainerConfig, "inference": InferenceConfig, "orchestrator": OrchestratorConfig
    }  # fmt: skip
    found = {"tracking", *(".".join(place) for place in _TOP.values())}
    for role, section in sections.items():
        block = fields(RLRunSpec)[role].model
        assert block is not None
        for name in section.model_fields:
            if find_field(RLRunSpec, name) is not None:
                found.add(spelled(RLRunSpec, name, "camel"))
            elif find_field(block, name) is not None and (role, name) not in _OF_OTHERS:
                found.add(f"{role}.{spelled(block, name, 'camel')}")
    return frozenset(found)


def _put(found: Json, shape: Shape, place: tuple[str, ...], value: object) -> None:
    """Set a field by its Python names, in the names of the manifest; a name that is not a field is ignored."""
    table = found
    for at, name in enumerate(place):
        if shape.model is None or (known := find_field(shape.model, name)) is None:
            return
        alias, shape = spelled(shape.model, known, "camel"), fields(shape.model)[known]
        if at + 1 == len(place):
            table[alias] = _renamed(value, shape)
        else:
            table = table.setdefault(alias, {})


def _renamed(value: object, shape: Shape) -> object:
    if isinstance(value, Mapping) and shape.model is not None:
        found: Json = {}
        for name, one in value.items():
            _put(found, shape, (str(name),), one)
        return found
    if isinstance(value, Mapping) and shape.kind == "mapping":
        return {str(name): _renamed(one, shape.parts[0]) for name, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, shape.parts[0]) if shape.kind == "list" else one for one in value]
    return value


def _laid_over(below: Json, above: Json) -> Json:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _laid_over(below[name], value) if both else value
    return merged
