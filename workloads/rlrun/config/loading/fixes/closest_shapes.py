"""Proposals for values with a wrong shape: a list for a mapping, a name for a block, and the reverse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlrun.config.loading.fixes.closest_values import NOTHING, closest_scalars
from rlrun.config.loading.schema import Shape, field_shapes, find_field, snake_name, spell_name
from rlrun.runtime.redact import is_secret, is_token

_LEVELS = 3
"""Most blocks that are added around a value."""
_FIRST = ("name", "id", "preset", "path", "rank", "interval", "project", "size")
"""Fields that a short form of a block most likely sets, in order."""
_FILE = re.compile(r"[./~$]|.*\.(jsonl?|parquet|csv|arrow|safetensors)$")
_MAPPING_SIZE = re.compile(r"\d+(\.\d+)?[KMGTP]i?")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*[=:]\s*(.*?)\s*")


@dataclass(frozen=True)
class Surroundings:
    """Names around a value."""

    field: str
    """Name of the field."""
    run: str = "my"
    """Name of the run."""
    variable: str | None = None
    """Environment variable that the value belongs to."""


def closest_shapes(value: object, shape: Shape, around: Surroundings, levels: int = _LEVELS) -> Iterator[Any]:
    """Yield candidates of this shape in the manifest's spelling. They may be invalid."""
    if value is None or levels < 0:
        return
    if shape.nullable and (value is False or (isinstance(value, str) and value.strip().lower() in NOTHING)):
        yield None
    if shape.kind == "union":
        for part in shape.parts:
            yield from closest_shapes(value, part, around, levels)
    elif shape.kind == "list":
        yield from _list_shapes(value, shape.parts[0], around, levels)
    elif shape.kind == "mapping":
        yield from _mapping_shapes(value)
    elif shape.kind == "model" and shape.model is not None:
        yield from _block_shapes(value, shape.model, around, levels)
    else:
        yield from closest_scalars(value, shape, around.field)


def _list_shapes(value: object, item: Shape, around: Surroundings, levels: int) -> Iterator[list[object]]:
    if isinstance(value, list):
        fixed = [next(closest_shapes(entry, item, around, levels - 1), entry) for entry in value]
        if fixed != value:
            yield fixed
    elif isinstance(value, dict):
        if item.model is not None:
            if any(find_field(item.model, str(name)) for name in value):
                yield [value]
            entries = [named_entry(str(name), inner, item.model, around.run) for name, inner in value.items()]
            if all(entry is not None for entry in entries):
                yield list(entries)
        else:
            flag = "--" if snake_name(around.field).endswith("args") else ""
            yield [f"{flag}{name}={inner}" if inner is not True else f"{flag}{name}" for name, inner in value.items()]
    else:
        yield [value]
        if isinstance(value, str) and len(words := re.split(r"\s*,\s*|\s+", value.strip())) > 1:
            yield [*words]
        for candidate in closest_shapes(value, item, around, levels - 1):
            yield [candidate]


def named_entry(name: str, value: object, model: type[BaseModel], run: str) -> dict[str, object] | None:
    """Return the list item for `name: value`, or None if the items do not have such a short form."""
    known = [field for field in ("name", "id", "key") if field in model.model_fields]
    key = next((field for field in known if model.model_fields[field].is_required()), known[0] if known else None)
    if key is None:
        return None
    if isinstance(value, dict):
        return {key: name, **value}
    if value is None:
        return {key: name}
    if "value" not in model.model_fields:
        return None
    text = "true" if value is True else "false" if value is False else str(value)
    if "value_from" in model.model_fields and (is_secret(name) or is_token(text)):
        return {key: name, "valueFrom": {"secretKeyRef": {"name": f"{run}-keys", "key": name}}}
    return {key: name, "value": text}


def _mapping_shapes(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, str):
        value = re.split(r"\s*,\s*", value)
    if not isinstance(value, list):
        return
    found: dict[str, object] = {}
    for entry in value:
        if isinstance(entry, dict) and set(entry) in ({"name", "value"}, {"key", "value"}):
            found[str(entry.get("name", entry.get("key")))] = entry["value"]
        elif isinstance(entry, dict):
            found |= entry
        elif isinstance(entry, str) and (parts := _ASSIGNMENT.fullmatch(entry)):
            found[parts[1]] = parts[2]
        else:
            return
    if found:
        yield found


def _block_shapes(value: object, model: type[BaseModel], around: Surroundings, levels: int) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        if len(value) == 1:
            if isinstance(value[0], dict):
                yield value[0]
            yield from _block_shapes(value[0], model, around, levels)
        if value and all(isinstance(entry, dict) for entry in value):
            yield {name: inner for entry in value for name, inner in entry.items()}
        named = [next(_named_block(entry, model), {}) for entry in value if isinstance(entry, str)]
        if named and all(named) and len(named) == len(value):
            yield {name: inner for entry in named for name, inner in entry.items()}
        return
    if value is True:
        yield {}
    if isinstance(value, bool):
        if "enabled" in model.model_fields:
            yield {"enabled": value}
        return
    if isinstance(value, str):
        yield from _named_block(value, model)
        if (parts := _ASSIGNMENT.fullmatch(value)) and (entry := named_entry(parts[1], parts[2], model, around.run)):
            yield entry
    if isinstance(value, str | int | float):
        yield from _short_forms(value, model, around, levels)


def _named_block(word: str, model: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Yield the block with the field of that name: `tracking: wandb`."""
    name = find_field(model, word.strip())
    if name is not None and field_shapes(model)[name].kind == "model":
        yield {spell_name(model, name, "camel"): {}}


def _short_forms(value: object, model: type[BaseModel], around: Surroundings, levels: int) -> Iterator[dict[str, Any]]:
    """Yield blocks in which one field has the value: `model: org/name`."""
    known = field_shapes(model)
    required = [name for name, info in model.model_fields.items() if info.is_required()]
    if around.variable is not None and set(required) == {"name", "key"}:
        yield {"name": value, "key": around.variable}
    if "value_from" in known or "secret_key_ref" in known:  # the value should be in a Secret
        yield {"secretKeyRef": {"name": f"{around.run}-keys", "key": around.variable or "token"}}
    if isinstance(value, str) and _MAPPING_SIZE.fullmatch(value):  # `storage: 50Gi`
        for name, shape in known.items():
            if shape.kind == "model" and shape.model is not None and "size" in field_shapes(shape.model):
                yield {spell_name(model, name, "camel"): {"size": value}}
    first = ("path", *_FIRST) if isinstance(value, str) and _FILE.match(value) else _FIRST
    order = sorted(known, key=lambda name: first.index(name) if name in first else len(first))
    for name in order:
        if known[name].kind in ("str", "int", "float", "choice") and not isinstance(value, bool):
            yield {spell_name(model, name, "camel"): value}
    for name in order:
        if known[name].kind in ("model", "list") and (name in required or known[name].nullable):
            for inner in closest_shapes(value, known[name], around, levels - 1):
                if inner is not None:
                    yield {spell_name(model, name, "camel"): inner}
