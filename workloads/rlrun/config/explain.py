"""Validation with messages for people: pydantic's errors in terms of what the user wrote, where, and what is expected instead."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlrun.config.layers import Layer, Origin, display
from rlrun.config.problems import ConfigError, Problem
from rlrun.config.schema import Shape, child, expected, find_field
from rlrun.config.suggest import did_you_mean
from rlrun.config.yaml_text import Key

ModelT = TypeVar("ModelT", bound=BaseModel)
_SHOWN_CHARACTERS = 60
_FIELD_IN_MESSAGE = re.compile(r"[A-Za-z]\w*(?:\[\d+\])?(?:\.[A-Za-z]\w*(?:\[\d+\])?)*")
_OF_RANGE = ("greater_than", "less_than", "multiple_of", "finite_number", "too_short", "too_long", "literal_error")


def validate(model: type[ModelT], layer: Layer) -> ModelT:
    """The model of a layer's values.

    Raises:
        ConfigError: all problems of the layer and of its values, in the order of their lines.
    """
    problems = list(layer.problems)
    try:
        result = model.model_validate(layer.values, strict=True, by_name=True, by_alias=False)
    except ValidationError as error:
        broken = {(p.source, p.path) for p in problems}
        found = explain(error, model, layer)
        problems += [p for p in found if (p.source, p.path) not in broken]
    if problems:
        raise ConfigError(sorted(problems, key=lambda p: (p.source, p.line or 0)))
    return result


def explain(error: ValidationError, model: type[BaseModel], layer: Layer) -> list[Problem]:
    """One problem for each field that pydantic refuses."""
    problems: dict[Key, Problem] = {}
    for detail in error.errors(include_url=False):
        key, shape = _place(detail["loc"], model)
        if key not in problems:
            problems[key] = _problem(detail, key, shape, model, layer)
    return list(problems.values())


def _problem(detail: ErrorDetails, key: Key, shape: Shape, model: type[BaseModel], layer: Layer) -> Problem:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        origin, owner = layer.origin(key[:-1]), _shape_at(model, key[:-1]).model or model
        info = owner.model_fields[str(key[-1])]
        meaning = (info.description or "").split("\n")[0].rstrip(".")
        path = display(origin, owner, str(key[-1]))
        return Problem(origin.source, path, f"required, but not set: {meaning}", origin.line)
    if kind in ("value_error", "assertion_error"):
        origin, where = layer.origin(key), layer.origins.get(key, Origin("", ""))
        message = str(detail.get("ctx", {}).get("error", detail["msg"]))
        named = _field_in(message, key, model, layer) or origin
        path = where.path if where.source == named.source or not where.source else _camel(key, model)
        return Problem(named.source, path, message, named.line)
    origin = layer.origin(key)
    path = origin.path if key in layer.origins else _camel(key, model)
    got = _shown(value)
    if not kind.startswith(_OF_RANGE) or isinstance(value, str | bool):
        got += f" ({_kind_of(value)})" if _kind_of(value) else ""
    if kind.endswith(("too_short", "too_long")):
        size = len(value) if isinstance(value, str | list) else 0
        got += f" with {size} {'characters' if isinstance(value, str) else 'items'}"
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, [str(choice) for choice in shape.choices])
    return Problem(origin.source, path, f"got {got}, expected {expected(shape)}{hint}", origin.line)


def _place(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[Key, Shape]:
    """Pydantic's location as a path of Python names; what it adds for the members of a union is left out."""
    key: Key = ()
    shape = Shape("model", model=model)
    for part in loc:
        if shape.kind == "model" and shape.model is not None:
            name = find_field(shape.model, str(part))
            if name is None:
                break
            key, shape = (*key, name), child(shape, name)
        elif shape.kind in ("list", "mapping"):
            key, shape = (*key, part), child(shape, part)
        else:
            break
    return key, shape


def _shape_at(model: type[BaseModel], key: Key) -> Shape:
    shape = Shape("model", model=model)
    for part in key:
        shape = child(shape, part)
    return shape


def _field_in(message: str, key: Key, model: type[BaseModel], layer: Layer) -> Origin | None:
    """The origin of the first field that a validator's message names and that somebody has set."""
    for words in _FIELD_IN_MESSAGE.findall(message):
        loc = [int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", words.rstrip("]"))]
        named, _ = _place((*key, *loc), model)
        if len(named) == len(key) + len(loc) and named in layer.origins:
            return layer.origins[named]
    return None


def _camel(key: Key, model: type[BaseModel]) -> str:
    shape, path = Shape("model", model=model), ""
    for part in key:
        if shape.model is not None:
            name = shape.model.model_fields[str(part)].alias or str(part)
            path += f".{name}" if path else name
        else:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        shape = child(shape, part)
    return path


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _kind_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    kinds = {str: "a string", list: "a list", dict: "a mapping", int: "a number", float: "a number"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")
