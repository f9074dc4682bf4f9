"""Validation of a document by a pydantic model, with all problems in one round.

The first part converts pydantic's errors into messages with source, path, value and the expected value, in the spelling of the user's text.

Pydantic checks a model's own rules only after all its fields are valid, and stops at the first broken rule. Therefore the second part
replaces each invalid value by its default or a stand-in and validates again until no problem is left. A problem that involves a replaced
field may be a consequence of the replacement and is not reported.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlrun.config.loading.fixes.repair import empty_block, is_hidden, suggest_repair, written_field
from rlrun.config.loading.layers import Layer, Origin, origin_of_missing
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.loading.schema import Shape, child_shape, describe_expected, field_meaning, place_of
from rlrun.config.loading.yaml_text import Key
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


ModelT = TypeVar("ModelT", bound=BaseModel)
MAX_ROUNDS = 100
_STAND_IN = "rlrun-stand-in"
"""Stand-in for a string. A rule whose message contains it is about a replacement."""


@dataclass(frozen=True)
class Examined(Generic[ModelT]):
    """Result of a validation, as far as the document is valid."""

    result: ModelT | None
    """Model with stand-ins for invalid values, or None if validation never succeeded."""
    problems: list[Problem]
    replaced: frozenset[Key]
    """Paths, in Python names, of values that were replaced."""

    def is_replaced(self, key: Key) -> bool:
        """Return whether a value, a part of it or a value around it was replaced."""
        return _touches_path(self.replaced, key)


def examine_layer(model: type[ModelT], layer: Layer) -> Examined[ModelT]:
    """Validate a layer's values repeatedly, until every problem is found."""
    values, problems, replaced = copy.deepcopy(layer.values), list(layer.problems), set[Key]()
    broken = {(problem.source, problem.path) for problem in problems}
    unread = {(problem.source, problem.line) for problem in problems if not problem.path and problem.line is not None}
    result: ModelT | None = None
    root = Shape("model", model=model)
    # Each round replaces at least one invalid value, so that the next round reaches rules that this one could not check.
    for _ in range(MAX_ROUNDS):
        try:
            result = model.model_validate(values, strict=True, by_name=True, by_alias=False)
            break
        except ValidationError as error:
            faults = explain_faults(error, model, layer)
        # Report only faults of the user's own values, and only one problem per field.
        news = [fault for fault in faults if not _follows_replacement(fault, replaced, root)]
        news = [fault for fault in news if (fault.problem.source, fault.problem.line) not in unread]
        problems += [f.problem for f in news if (f.problem.source, f.problem.path) not in broken]
        changed = [_replace_faulty(values, fault, root, replaced) for fault in faults]
        if not any(changed):
            break
    problems = sorted(dict.fromkeys(problems), key=lambda p: (p.source, p.line or 0))
    return Examined(result, problems, frozenset(replaced))


def validate_layer(model: type[ModelT], layer: Layer) -> ModelT:
    """Return the model of a layer's values.

    Raises:
        ConfigError: All problems of the layer and of its values, in the order of their lines.
    """
    examined = examine_layer(model, layer)
    if examined.problems or examined.result is None:
        raise ConfigError(examined.problems)
    return examined.result


def _touches_path(replaced: Iterable[Key], key: Key) -> bool:
    return any(key[: len(other)] == other or other[: len(key)] == key for other in replaced)


def _follows_replacement(fault: Fault, replaced: set[Key], root: Shape) -> bool:
    """Return whether a fault may come from a replacement. Problems in a list's items do not affect rules about the list itself."""
    if _STAND_IN in fault.problem.message or any(fault.key[: len(other)] == other for other in replaced):
        return True
    if fault.rule and any(key[-1:] == ("task",) for key in replaced):
        return True  # each task has its own rules
    lists = {key for key in fault.named if _shape_at_path(root, key).kind == "list"}
    return any(_touches_path(replaced, key) for key in fault.named if key not in lists) or any(
        key[: len(other)] == other for other in replaced for key in lists
    )


def _replace_faulty(values: dict[str, object], fault: Fault, root: Shape, replaced: set[Key]) -> bool:
    """Replace the value that a fault is about; return whether anything changed."""
    # A rule names the field to change first. Fields that were replaced already are tried again only if no other field helps.
    candidates = [key for key in fault.named if key not in replaced] if fault.rule else []
    for key in (*candidates, *(fault.named if fault.rule else ()), fault.key):
        if key and _replace_one(values, key, root, again=key in replaced):
            replaced.add(key)
            return True
    return False


def _replace_one(values: dict[str, object], key: Key, root: Shape, *, again: bool) -> bool:
    parent: Any = values
    shape = root
    for part in key[:-1]:
        shape = child_shape(shape, part)
        try:
            parent = parent[part]
        except (KeyError, IndexError, TypeError):
            return False
    last, shape = key[-1], child_shape(shape, key[-1])
    if isinstance(parent, list):
        stand_in = _stand_in(shape)
        if not isinstance(last, int) or last >= len(parent) or parent[last] == stand_in:
            return False
        parent[last] = stand_in
        return True
    if not isinstance(parent, dict):
        return False
    value = parent.get(last)
    if isinstance(value, list) and len(value) > 1 and shape.kind == "list":
        parent[last] = value[:1]
        return True
    if last in parent and value != [] and not (again and value == _stand_in(shape)):
        del parent[last]
        return True
    if again and last in parent:
        return False
    if _has_default(root, key):
        return False
    parent[last] = _stand_in(shape)
    return True


def _shape_at_path(root: Shape, key: Key) -> Shape:
    return functools.reduce(child_shape, key, root)


def _has_default(root: Shape, key: Key) -> bool:
    """Return whether a field has an effect of its own if it is not set."""
    shape = _shape_at_path(root, key[:-1])
    if shape.model is None:
        return True
    info = shape.model.model_fields[str(key[-1])]
    return not info.is_required() and info.get_default(call_default_factory=True) not in (None, [])


def _stand_in(shape: Shape) -> object:
    """Return a neutral value of the shape."""
    bounds = dict(shape.bounds)
    makers: dict[str, Callable[[], object]] = {
        "str": lambda: _STAND_IN,
        "bool": lambda: False,
        "int": lambda: max(1, int(bounds.get("ge", 1))),
        "float": lambda: max(1.0, float(bounds.get("ge", 1.0))),
        "choice": lambda: shape.choices[0],
        "list": lambda: [_stand_in(shape.parts[0])],
        "mapping": dict,
    }
    if shape.kind != "model" or shape.model is None:
        return makers.get(shape.kind, lambda: None)()
    return {
        name: _stand_in(child_shape(shape, name))
        for name, info in shape.model.model_fields.items()
        if info.is_required()
    }
