"""One source of configuration as a tree of Python names with the origin of every value, and the merging of sources."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from rlrun.config.loading.fixes.closest_values import named_entry
from rlrun.config.loading.fixes.unknown import unknown_field
from rlrun.config.loading.fixes.written import to_yaml
from rlrun.config.loading.problems import CONFIGURATION, ENVIRONMENT, Problem
from rlrun.config.loading.schema import (
    Shape,
    Style,
    child_shape,
    field_shapes,
    find_field,
    snake_name,
    spell_name,
    suggest_key,
)
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import close_name
from rlrun.runtime import redact

Place = dict[Any, Any] | list[Any]
"""A mapping or a list in a source's document."""


@dataclass(frozen=True)
class Origin:
    """Origin of a value."""

    source: str
    path: str
    """Path of the field as the user spelled it."""
    line: int | None = None
    style: Style = "camel"
    """Spelling of names in the source."""
    inside: bool = False
    """True for a block around a value with another project's name: `path` is the value's path, because the block has none."""


@dataclass(frozen=True)
class Hint:
    """A value of another project that has a meaning only together with others; see `rlrun.config.dialects.completion`."""

    value: Any
    origin: Origin


@dataclass
class Layer:
    """Values of one source."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, Origin] = field(default_factory=dict)
    """Origin of every value in `values`, by its path of Python names."""
    problems: list[Problem] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)
    """Notices for the user, which do not stop a run."""
    hints: dict[str, Hint] = field(default_factory=dict)
    """Values that are completed after all layers are merged."""

    def origin(self, key: Key) -> Origin:
        """Return the origin of `key`, or of the closest value around it."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, Origin(CONFIGURATION, ""))


@dataclass(frozen=True)
class Reader:
    """Reader of one source's document: its model, its name, and the lines of its fields."""

    model: type[BaseModel]
    """The root model."""
    source: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    style: Style = "camel"
    """Spelling of names in suggestions."""
    camel_only: bool = False
    """Accept only camelCase, as the API server does."""
    prefix: str = ""
    """Prefix of environment variables."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields of the root model."""

    def read(self, document: Mapping[str, object], *, line: int | None = None) -> Layer:
        """Return the whole document as a layer of the root model."""
        layer = Layer(origins={(): Origin(self.source, "", line, self.style)})
        layer.values = self.value(document, Shape("model", model=self.model), (), "", (), layer)
        return layer

    def value(self, value: object, shape: Shape, key: Key, path: str, raw: Key, layer: Layer) -> Any:
        """Return `value` with its keys as Python names. Origins and unknown keys are added to `layer`.

        Args:
            value: plain data.
            shape: expected shape; a value of another kind is returned unchanged, and the model refuses it.
            key: path of Python names in the root model.
            path: path as the user spelled it.
            raw: path in the document, to find the line.
            layer: layer that collects the results.
        """
        if key:
            layer.origins[key] = Origin(self.source, path, self.lines.get(raw), self.style)
        if shape.kind == "model" and shape.model is not None and isinstance(value, dict):
            return self._read_fields(value, shape.model, key, path, raw, layer)
        if shape.kind == "list" and isinstance(value, list):
            item = shape.parts[0]
            return [self.value(part, item, (*key, i), f"{path}[{i}]", (*raw, i), layer) for i, part in enumerate(value)]
        if shape.kind == "mapping" and isinstance(value, dict):
            item = shape.parts[0]
            return {
                name: self.value(part, item, (*key, name), f"{path}.{name}", (*raw, name), layer)
                for name, part in value.items()
            }
        return value

    def _read_fields(
        self, document: dict[str, object], model: type[BaseModel], key: Key, path: str, raw: Key, layer: Layer
    ) -> dict[str, object]:
        result: dict[str, object] = {}
        for name, value in document.items():
            here = f"{path}.{name}" if path else name
            line = self.lines.get((*raw, name))
            spelling = name if key else self.aliases.get(name, name)
            known = find_field(model, spelling, camel_only=self.camel_only)
            if known is None:
                if model.model_config.get("extra") != "ignore":
                    why = getattr(model, "refused_fields", {}).get(snake_name(name))
                    hint = f": {why}" if why else self._suggest_key(model, name, path, value, document)
                    layer.problems.append(Problem(self.source, here, f"unknown field{hint}", line))
                    if intended := self._intended_fields(model, name, value, document):
                        result |= {
                            known_name: self.value(
                                part, field_shapes(model)[known_name], (*key, known_name), here, (*raw, name), layer
                            )
                            for known_name, part in intended.items()
                        }
            elif known in result:
                other = layer.origins[*key, known].path
                layer.problems.append(Problem(self.source, here, f"set twice, also as {other}; remove one", line))
            else:
                result[known] = self.value(value, field_shapes(model)[known], (*key, known), here, (*raw, name), layer)
        return result

    def _suggest_key(
        self, model: type[BaseModel], name: str, path: str, value: object, document: dict[str, object]
    ) -> str:
        if self.style != "camel":
            return suggest_key(model, name, self.model, self.style)
        if (item := self._named_item(model, name, value, document)) is not None:
            text = to_yaml(item)
            return f"; write {text}" if redact.redact_text(text, []) == text else ""
        return unknown_field(model, name, self.model, path, value)

    def _named_item(
        self, model: type[BaseModel], name: str, value: object, document: dict[str, object]
    ) -> dict[str, object] | None:
        """Return the list item that is written only as its name and its value: `- OMP_NUM_THREADS: 4`."""
        if len(document) > 1 or "value" not in model.model_fields:
            return None
        return named_entry(name, value, model, "my")

    def _intended_fields(
        self, model: type[BaseModel], name: str, value: object, document: dict[str, object]
    ) -> dict[str, object]:
        """Return required fields that an unknown field probably means, so that they are not reported as missing too."""
        if self.style == "camel" and (item := self._named_item(model, name, value, document)) is not None:
            return {known: part for key, part in item.items() if (known := find_field(model, key)) is not None}
        given = {snake_name(key) for key in document}
        missing = {
            spell_name(model, required, "camel"): required
            for required, info in model.model_fields.items()
            if info.is_required() and required not in given
        }
        close = close_name(name, missing)
        return {missing[close]: value} if close is not None else {}


def merge_layers(layers: Sequence[Layer]) -> Layer:
    """Merge layers: a later value replaces an earlier one, mappings are merged, lists are replaced."""
    result = Layer()
    for layer in layers:
        result.problems += layer.problems
        result.notices += layer.notices
        result.hints |= layer.hints
        result.values = _merge_mappings(result, layer, result.values, layer.values, ())
        if () in layer.origins:
            result.origins[()] = layer.origins[()]
    return result


def _merge_values(result: Layer, layer: Layer, below: object, above: object, key: Key) -> object:
    if isinstance(below, dict) and isinstance(above, dict):
        return _merge_mappings(result, layer, below, above, key)
    _take_origins(result, layer, key)
    return copy.deepcopy(above)


def _merge_mappings(
    result: Layer, layer: Layer, below: Mapping[str, object], above: Mapping[str, object], key: Key
) -> dict[str, object]:
    merged = dict(below)
    for name, value in above.items():
        merged[name] = _merge_values(result, layer, below[name], value, (*key, name)) if name in below else value
        if name not in below:
            _take_origins(result, layer, (*key, name))
    if key in layer.origins:
        result.origins[key] = layer.origins[key]
    return merged


def _take_origins(result: Layer, layer: Layer, key: Key) -> None:
    depth = len(key)
    for old in [k for k in result.origins if k[:depth] == key]:
        del result.origins[old]
    result.origins.update({k: origin for k, origin in layer.origins.items() if k[:depth] == key})


@dataclass(frozen=True)
class Assignment:
    """One value for one path, from an option of the command line or from an environment variable."""

    key: Key
    value: Any
    origin: Origin


def assign_values(layer: Layer, model: type[BaseModel], assignments: Sequence[Assignment]) -> None:
    """Set values in `layer`, in order. A mapping is merged into the existing mapping; a list index may be the next unused one."""
    for assignment in assignments:
        *parents, last = assignment.key
        shape = Shape("model", model=model)
        place: Place = layer.values
        ok = True
        # Walk to the block around the value, and create missing blocks with the origin of this assignment.
        for depth, part in enumerate(parents):
            ok = ok and _has_index(layer, place, part, assignment)
            if not ok:
                break
            shape = child_shape(shape, part)
            inside = _value_inside(place, part)
            if not isinstance(inside, dict | list):
                created: Place = [] if shape.kind == "list" else {}
                _put_value(place, part, created)
                layer.origins.setdefault(assignment.key[: depth + 1], _enclosing_origin(assignment, depth + 1))
                inside = created
            place = inside
        if ok and _has_index(layer, place, last, assignment):
            _put_value(place, last, _merged_mapping(place, last, assignment.value))
            layer.origins[assignment.key] = assignment.origin


def _enclosing_origin(assignment: Assignment, length: int) -> Origin:
    """Return the origin of the block around an assignment, with the matching part of its name: `--policies` of `--policies.steps`.

    Another project's name has the same index for an item of a list, but may have other names for blocks.
    """
    origin, key = assignment.origin, assignment.key
    words = _path_words(origin)
    tail = [str(part) for part in key[length:]]
    if len(words) > len(tail) and [snake_name(word.lower()) for word, _ in words[-len(tail) :]] == tail:
        return replace(origin, path=origin.path[: words[-len(tail) - 1][1]])
    items = [place for place, (word, _) in enumerate(words) if word.isdecimal()]
    before = sum(isinstance(part, int) for part in key[:length])
    if isinstance(key[length - 1], int) and before <= len(items):
        return replace(origin, path=origin.path[: words[items[before - 1]][1]])
    if isinstance(key[length], int) and before < len(items) and items[before]:
        return replace(origin, path=origin.path[: words[items[before] - 1][1]])
    return replace(origin, inside=True)


_WORD = re.compile(r"\[(\d+)\]|[^.\[\]]+")


def _path_words(origin: Origin) -> list[tuple[str, int]]:
    """Return the words of a path as the user spelled it, each with the position after it."""
    if origin.source == ENVIRONMENT:
        ends = [*(found.start() for found in re.finditer("__", origin.path)), len(origin.path)]
        return list(zip(origin.path.split("__"), ends, strict=True))
    start = 2 if origin.path.startswith("--") else 0
    return [(found[1] or found[0], found.end()) for found in _WORD.finditer(origin.path, start)]


def _merged_mapping(place: Place, part: str | int, value: object) -> object:
    old = _value_inside(place, part)
    if isinstance(old, dict) and isinstance(value, dict):
        return {**old, **{name: _merged_mapping(old, name, new) for name, new in value.items()}}
    return value


def _value_inside(place: Place, part: str | int) -> object:
    if isinstance(place, dict):
        return place.get(part)
    return place[part] if isinstance(part, int) and part < len(place) else None


def _has_index(layer: Layer, place: Place, part: str | int, assignment: Assignment) -> bool:
    if isinstance(place, dict) or (isinstance(part, int) and part <= len(place)):
        return True
    origin = assignment.origin
    layer.problems.append(
        Problem(origin.source, origin.path, f"item {part} does not exist; the next index is {len(place)}", origin.line)
    )
    return False


def _put_value(place: Place, part: str | int, value: object) -> None:
    if isinstance(place, dict):
        place[part] = value
    elif part == len(place):
        place.append(value)
    elif isinstance(part, int):
        place[part] = value


def origin_of_missing(layer: Layer, model: type[BaseModel], key: Key) -> Origin:
    """Return the place where a missing field would be written: next to the fields around it, in the spelling of their source."""
    near = layer.origin(key[:-1])
    depth = next((n for n in range(len(key) - 1, 0, -1) if _has_own_name(layer, key[:n], near)), 0)
    path = layer.origins[key[:depth]].path if depth or _has_own_name(layer, (), near) else ""
    shape = Shape("model", model=model)
    for place, part in enumerate(key):
        if place >= depth:
            path = _name_below(
                path, part if shape.model is None else spell_name(shape.model, str(part), near.style), near
            )
        shape = child_shape(shape, part)
    return replace(near, path=path)


def _has_own_name(layer: Layer, key: Key, near: Origin) -> bool:
    """Return whether a block has its own name in the source of another value."""
    found = layer.origins.get(key)
    return found is not None and not found.inside and found.source == near.source


def _name_below(path: str, name: str | int, near: Origin) -> str:
    """Return the path of a name below another path of a source."""
    if near.source == ENVIRONMENT:
        return f"{path}__{str(name).upper()}" if path else f"RLRUN_{str(name).upper()}"
    if near.style == "kebab":
        return f"{path}.{name}" if path else f"--{name}"
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name
