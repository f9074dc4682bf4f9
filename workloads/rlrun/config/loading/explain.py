"""Validation errors of pydantic as messages with source, path, value and what is expected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlrun.config.loading.fixes.repair import empty_block, is_hidden, suggest_repair, written_field
from rlrun.config.loading.layers import Layer, Origin, origin_of_missing
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.schema import Shape, child_shape, describe_expected, place_of
from rlrun.config.loading.yaml_text import Key
from rlrun.config.meaning import field_meaning
from rlrun.config.suggest import did_you_mean
from rlrun.runtime.redact import REMOVED, redact_document

_RULES = ("value_error", "assertion_error")
_SHOWN_CHARACTERS = 60
_SCALARS = ("str", "int", "float", "bool", "choice", "union")
_FIELD_IN_MESSAGE = re.compile(r"[A-Za-z]\w*(?:\[\d+\])?(?:\.[A-Za-z]\w*(?:\[\d+\])?)*")
_UNKNOWN = re.compile(r"unknown (\w+) '")
_OF_RANGE = ("greater_than", "less_than", "multiple_of", "finite_number", "too_short", "too_long", "literal_error")


@dataclass(frozen=True)
class Fault:
    """One error of pydantic."""

    key: Key
    """Path of the value, in Python names; for a rule between fields, path of their block."""
    problem: Problem
    rule: bool
    """Whether a rule between fields is broken; otherwise the value itself is invalid."""
    named: tuple[Key, ...]
    """Fields in the message of a rule; the field to change is first."""


def explain_faults(error: ValidationError, model: type[BaseModel], layer: Layer) -> list[Fault]:
    """Return one fault for each field that pydantic refuses."""
    faults: dict[Key, Fault] = {}
    for detail in error.errors(include_url=False):
        key, shape = place_of(detail["loc"], model)
        if key not in faults:
            rule = detail["type"] in _RULES
            named = tuple(_named_fields(_fault_message(detail), key, model)) if rule else ()
            faults[key] = Fault(key, _describe_problem(detail, key, shape, model, layer), rule, named)
    return list(faults.values())


def _describe_problem(detail: ErrorDetails, key: Key, shape: Shape, model: type[BaseModel], layer: Layer) -> Problem:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        origin, owner = origin_of_missing(layer, model, key), _shape_at(model, key[:-1]).model or model
        text = field_meaning(owner, str(key[-1])).split("\n")[0].rstrip(".")
        description = f": {text}" if text else ""
        example = getattr(owner, "EXAMPLES", {}).get(str(key[-1]))
        fix = f"; write {written_field(origin, example)}" if example is not None and origin.style == "camel" else ""
        return Problem(origin.source, origin.path, f"required, but not set{description}{fix}", origin.line)
    if kind in _RULES:
        origin, where, message = layer.origin(key), layer.origins.get(key, Origin("", "")), _fault_message(detail)
        named = next((layer.origins[k] for k in _named_fields(message, key, model) if k in layer.origins), origin)
        path = where.path if where.source == named.source or not where.source else camel_path(key, model)
        if unknown := _UNKNOWN.match(message):
            path = next(
                (layer.origins[k].path for k in _named_fields(unknown[1], key, model) if k in layer.origins), path
            )
        fix = (
            suggest_repair(value, shape, key, model, layer)
            if shape.kind in _SCALARS
            else empty_block(key, model, layer)
        )
        return Problem(named.source, path, f"{message}{fix}", named.line)
    origin = layer.origin(key)
    path = origin.path if key in layer.origins else camel_path(key, model)
    got = _show_value(value, key, layer)
    if not kind.startswith(_OF_RANGE) or isinstance(value, str | bool):
        got += f" ({_kind_of(value)})" if _kind_of(value) else ""
    if kind.endswith(("too_short", "too_long")):
        size = len(value) if isinstance(value, str | list) else 0
        got += f" with {size} {'characters' if isinstance(value, str) else 'items'}"
    hint = suggest_repair(value, shape, key, model, layer)
    if not hint and kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, [str(choice) for choice in shape.choices])
    return Problem(origin.source, path, f"got {got}, expected {describe_expected(shape)}{hint}", origin.line)


def _shape_at(model: type[BaseModel], key: Key) -> Shape:
    shape = Shape("model", model=model)
    for part in key:
        shape = child_shape(shape, part)
    return shape


def _fault_message(detail: ErrorDetails) -> str:
    return str(detail.get("ctx", {}).get("error", detail["msg"]))


def _named_fields(message: str, key: Key, model: type[BaseModel]) -> Iterator[Key]:
    """Yield the fields in a validator's message, in order."""
    for words in _FIELD_IN_MESSAGE.findall(message):
        loc = [int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", words.rstrip("]"))]
        named, _ = place_of((*key, *loc), model)
        if len(named) == len(key) + len(loc):
            yield named


def find_place(key: Key, model: type[BaseModel], layer: Layer) -> Origin:
    """Return the origin of a field, or the place where it would be set."""
    origin = layer.origin(key)
    return origin if key in layer.origins else replace(origin, path=camel_path(key, model))


def camel_path(key: Key, model: type[BaseModel]) -> str:
    """Return a path of Python names with the manifest's spelling."""
    shape, path = Shape("model", model=model), ""
    for part in key:
        if shape.model is not None:
            name = shape.model.model_fields[str(part)].alias or str(part)
            path += f".{name}" if path else name
        else:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        shape = child_shape(shape, part)
    return path


def _show_value(value: object, key: Key, layer: Layer) -> str:
    """Return a value as JSON, truncated and without secrets."""
    if value is None:
        return "null"
    if is_hidden(key, layer):
        return REMOVED
    text = json.dumps(redact_document(value, []), ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _kind_of(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    kinds = {str: "a string", list: "a list", dict: "a mapping", int: "a number", float: "a number"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")
