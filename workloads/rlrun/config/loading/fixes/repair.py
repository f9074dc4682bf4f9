"""A valid value to replace a wrong one, as text to copy. A candidate is shown only if the model accepts it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import cast

from pydantic import BaseModel, ValidationError

from rlrun.config.loading.fixes.closest_values import Surroundings, closest_shapes
from rlrun.config.loading.fixes.written import to_toml, to_yaml
from rlrun.config.loading.layers import Layer, Origin, Reader
from rlrun.config.loading.problems import COMMAND_LINE, ENVIRONMENT
from rlrun.config.loading.schema import Shape, place_of
from rlrun.config.loading.yaml_text import Key
from rlrun.runtime import redact

_Container = MutableMapping[str | int, object]
"""Block, or a list by index."""
_TRIES = 24
"""Most candidates to test for one value."""
_LENGTH = 160
"""Longest text of a fix, in characters."""


def suggest_repair(value: object, shape: Shape, key: Key, model: type[BaseModel], layer: Layer) -> str:
    """Return the end of a message with the text to write instead, such as `; write maxSteps: 1000`, or an empty string.

    Args:
        value: wrong value.
        shape: shape of its field.
        key: path of the field, in Python names.
        model: model of the whole document.
        layer: layer of the document.
    """
    origin = layer.origin(key)
    # Only a value that the layer contains can be replaced there.
    if key not in layer.origins or not key:
        return ""
    if value is None and not shape.nullable:
        name = _last_name(origin.path)
        return f"; remove {name}" if name and _is_accepted(model, layer, key, None, remove=True) else ""
    if isinstance(value, str) and (unfilled := unfilled_text_fix(value, origin.source)):
        return unfilled
    if (secret := _secret_fix(value, key, model, layer)) is not None:
        return secret
    for candidate in islice(_distinct_candidates(closest_shapes(value, shape, _wrap_block(key, layer))), _TRIES):
        read = _read_candidate(candidate, shape, key, model)
        if read is not None and _is_accepted(model, layer, key, read[0]):
            written = written_field(origin, candidate)
            return f"; write {written}" if written else ""
    return _sibling_fix(value, key, model, layer, origin)


def unfilled_text_fix(value: str, source: str) -> str:
    """Return the fix for a template, variable or placeholder that was not filled in, or an empty string."""
    if "{{" in value or "{%" in value:
        return "; it is a template: replace it with a value, or render the file first, such as with helm template"
    if re.search(r"\$\{?[A-Za-z_]|^%\w+%$", value) and "/" not in value:
        return f"; variables are not expanded here: run envsubst < {source} | rlrun validate -, or write the value"
    if re.fullmatch(r"<[^<>]*>", value.strip()):
        return "; it is a placeholder: replace it with a value"
    return ""


def empty_block(key: Key, model: type[BaseModel], layer: Layer) -> str:
    """Return the fix for a block directly in the block `key` that is written without a value (`tiny:`), or an empty string."""
    inside: object = layer.values
    try:
        for part in key:
            inside = _item(inside, part)
    except (KeyError, IndexError, TypeError):
        return ""
    block: dict[str, object] = inside if isinstance(inside, dict) else {}
    for name, value in block.items():
        below, shape = place_of((*key, name), model)
        if (
            value is None
            and shape.kind == "model"
            and below in layer.origins
            and _is_accepted(model, layer, key, {**block, name: {}})
        ):
            return f"; write {written_field(layer.origins[below], {})}"
    return ""


def _container(value: object, part: str | int) -> _Container:
    """Return a block or a list that may have an item `part`; raise `TypeError` for other values."""
    if isinstance(value, dict) or (isinstance(value, list) and isinstance(part, int)):
        return cast(_Container, value)
    raise TypeError


def _item(value: object, part: str | int) -> object:
    """Return an item of a block or a list; raise `KeyError`, `IndexError` or `TypeError` if there is none."""
    return _container(value, part)[part]


def is_hidden(key: Key, layer: Layer) -> bool:
    """Return whether a value has the name of a secret, either its own name or that of its environment variable."""
    names = [part for part in key if isinstance(part, str)]
    variable = _wrap_block(key, layer).variable
    return bool(names and redact.is_secret(names[-1].replace("_", ""))) or (
        names[-1:] == ["value"] and redact.is_secret(variable or "")
    )


def _secret_fix(value: object, key: Key, model: type[BaseModel], layer: Layer) -> str | None:
    """Return the fix for an environment variable whose value should be in a Secret, or None."""
    _, shape = place_of(key[:-1], model)
    if key[-1:] != ("value",) or shape.model is None or "value_from" not in shape.model.model_fields:
        return None
    if not is_hidden(key, layer) and not redact.is_token(json.dumps(value, default=str)):
        return None
    around = _wrap_block(key, layer)
    return f"; write {secret_reference(around.run, around.variable or 'token')}"


def secret_reference(run: str, name: str) -> str:
    """Return the source of a variable that takes its value from a Secret."""
    return f"valueFrom: {{secretKeyRef: {{name: {run}-keys, key: {name}}}}}"


def _sibling_fix(value: object, key: Key, model: type[BaseModel], layer: Layer, origin: Origin) -> str:
    """Return the fix that moves the value to another field of the block (a folder from `name` to `path`), or splits `name@revision`."""
    _, shape = place_of(key[:-1], model)
    if not isinstance(value, str) or shape.model is None or not isinstance(key[-1], str) or len(key) < 2:
        return ""
    name, known = _last_name(origin.path), shape.model.model_fields
    if "revision" in known and (found := re.fullmatch(r"([^@]+)@([^@/]+)", value)):
        block = {str(key[-1]): found[1], "revision": found[2]}
        if _is_accepted(model, layer, key[:-1], _replace_field(layer, key, block)):
            # The braces of both mappings are removed, and one pair is added.
            return f"; write {{{to_yaml({name: found[1]})[1:-1]}, {to_yaml({'revision': found[2]})[1:-1]}}}"
    for other in ("path", "name"):
        if (
            other in known
            and other != key[-1]
            and _is_accepted(model, layer, key[:-1], _replace_field(layer, key, {other: value}))
        ):
            written = written_field(origin, value, name=other)
            return f"; write {written}" if written else ""
    return ""


def _replace_field(layer: Layer, key: Key, block: dict[str, object]) -> dict[str, object]:
    """Return the block around a field, with other fields instead of the field."""
    around: object = layer.values
    for part in key[:-1]:
        around = _item(around, part) if isinstance(around, dict | list) else {}
    kept = around if isinstance(around, dict) else {}
    return {name: inner for name, inner in kept.items() if name != key[-1]} | block


def _wrap_block(key: Key, layer: Layer) -> Surroundings:
    """Return the names around a value: its field, the run, and the environment variable that it belongs to."""
    names = [part for part in key if isinstance(part, str)]
    inside: object = layer.values
    variable: str | None = None
    for part in key:
        if isinstance(inside, dict) and isinstance(inside.get("name"), str):
            variable = inside["name"]
        try:
            inside = _item(inside, part)
        except (KeyError, IndexError, TypeError):
            break
    metadata = layer.values.get("metadata")
    # A missing or invalid name of the run is replaced with the default.
    run = metadata.get("name") if isinstance(metadata, dict) else None
    own = run if isinstance(run, str) and re.fullmatch(r"[a-z][-a-z0-9]{0,40}", run) else "my"
    return Surroundings(names[-1] if names else "", own, variable if "env" in names else None)


def _distinct_candidates(candidates: Iterator[object]) -> Iterator[object]:
    seen: list[str] = []
    for candidate in candidates:
        if (text := repr(candidate)) not in seen:
            seen.append(text)
            yield candidate


def _read_candidate(candidate: object, shape: Shape, key: Key, model: type[BaseModel]) -> tuple[object] | None:
    """Return a candidate in Python names, as a tuple of one item because the candidate may be None; None if it has unknown fields."""
    scratch = Layer()
    value = Reader(model, "", camel_only=True).value(copy.deepcopy(candidate), shape, key, "", (), scratch)
    return None if scratch.problems else (value,)


def _is_accepted(model: type[BaseModel], layer: Layer, key: Key, value: object, *, remove: bool = False) -> bool:
    """Return whether the document with this value has no problem at or below `key`."""
    values = copy.deepcopy(layer.values)
    parent: object = values
    try:
        for part in key[:-1]:
            parent = _item(parent, part)
        if remove:
            del _container(parent, key[-1])[key[-1]]
        elif key:
            _container(parent, key[-1])[key[-1]] = value
    except (KeyError, IndexError, TypeError):
        return False
    try:
        model.model_validate(values, strict=True, by_name=True, by_alias=False)
    except ValidationError as error:
        places = [place_of(detail["loc"], model)[0] for detail in error.errors(include_url=False)]
        return not any(place[: len(key)] == key for place in places)
    return True


def written_field(origin: Origin, value: object, *, name: str | None = None) -> str:
    """Return a field with its value in the spelling of its source, or an empty string if it is long or contains a secret."""
    last = name if name is not None else _last_name(origin.path)
    if origin.source == COMMAND_LINE:
        option = origin.path if name is None else f"{origin.path.rpartition('.')[0]}.{name}"
        text = f"{option} {value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)}"
    elif origin.source == ENVIRONMENT:
        text = f"{origin.path}={value if isinstance(value, str) else json.dumps(value)}"
    elif not last:
        text = to_toml(value) if origin.style == "snake" else to_yaml(value)
    elif origin.style == "snake":
        text = f"{last} = {to_toml(value)}"
    else:
        text = f"{last}: {to_yaml(value)}"
    return text if len(text) <= _LENGTH and redact.redact_text(text, []) == text else ""


def _last_name(path: str) -> str:
    """Return the name of a field; empty for an item of a list."""
    return "" if path.endswith("]") else path.rpartition(".")[2]
