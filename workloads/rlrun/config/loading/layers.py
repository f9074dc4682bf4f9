"""One source of configuration as a tree by Python names, with the origin of every value; and how sources are laid over each other."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from rlrun.config.loading.fixes.closest_shapes import named_entry
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
"""A mapping or a list of a source's document."""


@dataclass(frozen=True)
class Origin:
    """Source of a value."""

    source: str
    path: str
    """The field as the user spelled it."""
    line: int | None = None
    style: Style = "camel"
    """Spelling of names in the source."""
    inside: bool = False
    """True of a block around a value that is written under a name of another project: `path` is the value's, and the block has none."""


@dataclass(frozen=True)
class Hint:
    """A value of another project that means something only beside others; see `rlrun.config.dialects.complete`."""

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
    """Notices for the user, which stop no run."""
    hints: dict[str, Hint] = field(default_factory=dict)
    """Values that are completed once all layers are one."""

    def origin(self, key: Key) -> Origin:
        """The origin of `key`, or of the closest value around it."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, Origin(CONFIGURATION, ""))


@dataclass(frozen=True)
class Reader:
    """Reading of one source's document: its model, its name, and the places of its fields."""

    model: type[BaseModel]
    """The root model."""
    source: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    style: Style = "camel"
    """The spelling that suggestions are written in."""
    camel_only: bool = False
    """Refuse every spelling but camelCase, as the API server does."""
    prefix: str = ""
    """Prefix of variables of the environment."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields of the root model."""

    def read(self, document: Mapping[str, object], *, line: int | None = None) -> Layer:
        """The whole document as a layer of the root model."""
        layer = Layer(origins={(): Origin(self.source, "", line, self.style)})
        layer.values = self.value(document, Shape("model", model=self.model), (), "", (), layer)
        return layer

    def value(self, value: object, shape: Shape, key: Key, path: str, raw: Key, layer: Layer) -> Any:
        """`value` of `shape` at `key` with its keys as Python names; origins and unknown keys go into `layer`.

        Args:
            value: plain data.
            shape: what is expected there; a value of another kind is returned as it is, for the model to refuse.
            key: path of Python names in the root model.
            path: the path as the user spelled it.
            raw: the path in the document, for the line.
            layer: what is read so far.
        """
        if key:
            layer.origins[key] = Origin(self.source, path, self.lines.get(raw), self.style)
        if shape.kind == "model" and shape.model is not None and isinstance(value, dict):
            return self._fields(value, shape.model, key, path, raw, layer)
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

    def _fields(
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
                    hint = f": {why}" if why else self._hint(model, name, path, value, document)
                    layer.problems.append(Problem(self.source, here, f"unknown field{hint}", line))
                    if meant := self._meant(model, name, value, document):
                        result |= {
                            one: self.value(part, field_shapes(model)[one], (*key, one), here, (*raw, name), layer)
                            for one, part in meant.items()
                        }
            elif known in result:
                other = layer.origins[*key, known].path
                layer.problems.append(Problem(self.source, here, f"set twice, as {other} too; remove one", line))
            else:
                result[known] = self.value(value, field_shapes(model)[known], (*key, known), here, (*raw, name), layer)
        return result

    def _hint(self, model: type[BaseModel], name: str, path: str, value: object, document: dict[str, object]) -> str:
        if self.style != "camel":
            return suggest_key(model, name, self.model, self.style)
        if (item := self._entry(model, name, value, document)) is not None:
            text = to_yaml(item)
            return f"; write {text}" if redact.redact_text(text, []) == text else ""
        return unknown_field(model, name, self.model, path, value)

    def _entry(
        self, model: type[BaseModel], name: str, value: object, document: dict[str, object]
    ) -> dict[str, object] | None:
        """The item of a list that is written as its name and its value alone: `- OMP_NUM_THREADS: 4`."""
        if len(document) > 1 or "value" not in model.model_fields:
            return None
        return named_entry(name, value, model, "my")

    def _meant(
        self, model: type[BaseModel], name: str, value: object, document: dict[str, object]
    ) -> dict[str, object]:
        """Required fields that an unknown one stands for, so that they do not count as missing, too."""
        if self.style == "camel" and (item := self._entry(model, name, value, document)) is not None:
            return {known: part for key, part in item.items() if (known := find_field(model, key)) is not None}
        given = {snake_name(key) for key in document}
        missing = {
            spell_name(model, one, "camel"): one
            for one, info in model.model_fields.items()
            if info.is_required() and one not in given
        }
        close = close_name(name, missing)
        return {missing[close]: value} if close is not None else {}


def merge_layers(layers: Sequence[Layer]) -> Layer:
    """All layers as one: a later value replaces an earlier one, mappings are merged, lists are replaced."""
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
    """One value for one path: an option of the command line or a variable of the environment."""

    key: Key
    value: Any
    origin: Origin


def assign_values(layer: Layer, model: type[BaseModel], assignments: Sequence[Assignment]) -> None:
    """Set values in `layer`, in order; a mapping is merged into what is there, an index of a list may be the next free one."""
    for assignment in assignments:
        *parents, last = assignment.key
        shape = Shape("model", model=model)
        place: Place = layer.values
        ok = True
        for depth, part in enumerate(parents):
            ok = ok and _has_index(layer, place, part, assignment)
            if not ok:
                break
            shape = child_shape(shape, part)
            inside = _value_inside(place, part)
            if not isinstance(inside, dict | list):
                made: Place = [] if shape.kind == "list" else {}
                _put_value(place, part, made)
                layer.origins.setdefault(assignment.key[: depth + 1], _enclosing_origin(assignment, depth + 1))
                inside = made
            place = inside
        if ok and _has_index(layer, place, last, assignment):
            _put_value(place, last, _merged_mapping(place, last, assignment.value))
            layer.origins[assignment.key] = assignment.origin


def _enclosing_origin(assignment: Assignment, length: int) -> Origin:
    """Origin of the value around an assignment's, with the part of its name that spells it: `--policies` of `--policies.steps`.

    A name of another project spells an item of a list by the same index, and blocks by names that may be others.
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
    """Words of a path as the user spelled it, each with the place behind it."""
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
        Problem(
            origin.source, origin.path, f"there is no item {part}; the next free index is {len(place)}", origin.line
        )
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
    """Place where a field that is not set would be written: beside what is set around it, in that source's spelling."""
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
    """True if a block has a name of its own in the source that another value is from."""
    found = layer.origins.get(key)
    return found is not None and not found.inside and found.source == near.source


def _name_below(path: str, name: str | int, near: Origin) -> str:
    """A name below a path of a source."""
    if near.source == ENVIRONMENT:
        return f"{path}__{str(name).upper()}" if path else f"RLRUN_{str(name).upper()}"
    if near.style == "kebab":
        return f"{path}.{name}" if path else f"--{name}"
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name
