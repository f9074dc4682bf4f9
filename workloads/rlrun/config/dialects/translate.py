"""Translation of another project's document or option into assignments to our fields, with the place of each value."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from rlrun.config.dialects.rows import Dialect, Effect, Extend, Later, Note, Refuse, Row, Set, show_value
from rlrun.config.loading.layers import Assignment, Hint, Layer, Origin, assign_values
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.schema import Shape, Style, field_shapes, find_field, list_few, snake_name
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean

_LEVELS_MAX = 32
DIALECT = "dialect"
"""Hint: a key has another project's name."""
ENVIRONMENTS = "environments"
"""Hint: environments have another project's names."""
PARALLEL = "parallel"
"""Hint: the parallelism of the engines has another project's name; there, engines always run on GPUs."""
ROLES = ("trainer", "orchestrator", "inference")
_UNCLEAR = "an environment needs id or taskset, and a variable of the process needs value or valueFrom"
"""Requirement for an item of `orchestrator.env`, the only list that both projects have. It is identified by its items' keys."""


@dataclass(frozen=True)
class Read:
    """One key of a document, as it was read."""

    path: str
    """Dotted path, with `[]` for an item."""
    shown: str
    """Key as the user wrote it."""
    value: object
    row: Row | None
    """Row of the key; None: the key is one of ours or unknown."""
    line: int | None
    table: bool = False
    """Whether the value is a table whose keys are read individually too."""


@dataclass
class Translation:
    """Content of a document with our names, and the rest for our own reader."""

    assignments: list[Assignment] = field(default_factory=list)
    layer: Layer = field(default_factory=Layer)
    """Problems, notices and hints."""
    rest: dict[str, Any] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    """All keys that were read."""

    def as_layer(self, model: type[BaseModel]) -> Layer:
        """Return the assignments as a layer of `model`, with all problems, notices and hints."""
        assign_values(self.layer, model, self.assignments)
        return self.layer


@dataclass(frozen=True)
class Translator:
    """Reader of one source with another project's names."""

    dialect: Dialect
    model: type[BaseModel]
    """Model of a run's description."""
    source: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    style: Style = "snake"
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of our fields."""
    fallback: str = ""
    """Table whose keys may also be at the top, such as the trainer's in a file of supervised fine-tuning."""

    def read(self, document: Mapping[str, Any], table: str = "", raw: Key = (), shown: str = "") -> Translation:
        """Translate a document.

        Args:
            document: whole file, or the part of one role.
            table: role of the part; empty: whole run.
            raw: path of the part in the file, to find lines.
            shown: name of the part for messages.
        """
        result = Translation()
        models = [model for part in (table,) if part and (model := self._submodel(self.model, part)) is not None]
        place = _Place(table, raw, shown, (), (*models, self.model))
        result.rest = self._read_table(dict(document), place, result)
        return result

    def knows(self, words: Sequence[str]) -> bool:
        """Return whether an option or variable with these words belongs to the dialect and is not also a field of ours."""
        row, _ = self._covering_row(words)
        return row is not None and row.fate != "same"

    def option(self, words: Sequence[str], value: Any, shown: str) -> Translation | None:
        """Translate an option or variable; None if there is no row for it."""
        row, count = self._covering_row(words)
        if row is None:
            return None
        for word in reversed(words[count:]):
            value = {word: value}
        result = Translation()
        indices = tuple(int(word) for word in words[:count] if word.isdecimal())
        self._apply_row(row, value, _Place(_path_of(words[:count]), (), shown, indices, ()), result)
        return result

    def items(self, words: Sequence[str], value: object, shown: str) -> Translation | None:
        """Translate an option whose value is a list of the dialect's tables; None for other values and for tables of ours."""
        path, model = _path_of(words), self.model
        if (
            not isinstance(value, list)
            or not all(isinstance(item, dict) for item in value)
            or not self._has_below(f"{path}[]")
        ):
            return None
        for word in words[:-1]:
            if (below := self._submodel(model, word)) is None:
                break
            model = below
        else:
            if find_field(model, words[-1]) is not None and self._is_ours(value, [model], words[-1]):
                if not self._is_unclear(value, path):
                    return None
                result = Translation()
                self._refuse_unclear(value, _Place(path, (), shown, (), ()).at_index(0), result)
                return result
        result = Translation()
        self._read_items(value, _Place(path, (), shown, (), ()), result)
        merged = Layer()
        assign_values(merged, self.model, result.assignments)
        listed = {item.key[0] for item in result.assignments if len(item.key) > 1 and isinstance(item.key[1], int)}
        others = [item for item in result.assignments if item.key[0] not in listed]
        inner = {key: origin for key, origin in merged.origins.items() if len(key) > 1 and key[0] in listed}
        result.layer.origins |= inner
        origin = Origin(
            self.source, shown, None, self.style
        )  # the list replaces a list of a lower layer, like any list
        result.assignments = [
            *others,
            *(Assignment((name,), merged.values[str(name)], origin) for name in sorted(listed, key=str)),
        ]
        return result

    def _covering_row(self, words: Sequence[str]) -> tuple[Row | None, int]:
        """Return the row of dotted words, or of the closest table that it covers entirely, with the row's number of words."""
        for count in range(len(words), 0, -1):
            path = _path_of(words[:count])
            row = self._find_row(path)
            if row is not None and (count == len(words) or not self._has_below(path)):
                return row, count
        return None, 0

    def _find_row(self, path: str) -> Row | None:
        row = self.dialect.find_row(path)
        return self.dialect.find_row(f"{self.fallback}.{path}") if row is None and self.fallback else row

    def _has_below(self, path: str) -> bool:
        has = self.dialect.has_below
        return has(path) or (bool(self.fallback) and has(f"{self.fallback}.{path}"))

    def _submodel(self, model: type[BaseModel], name: str) -> type[BaseModel] | None:
        known = find_field(model, self.aliases.get(name, name))
        return None if known is None else field_shapes(model)[known].model

    def _read_table(self, table: dict[str, Any], place: _Place, result: Translation) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in table.items():
            inner = place.at_key(name)
            kept = self._read_key(name, value, inner, place, result)
            if kept is not _TAKEN:
                rest[name] = kept
        return rest

    def _read_key(self, name: str, value: Any, inner: _Place, place: _Place, result: Translation) -> Any:
        row = self._find_row(inner.path)
        below = self._has_below(inner.path) and len(inner.raw) < _LEVELS_MAX
        ours = [model for model in place.models if find_field(model, self.aliases.get(name, name)) is not None]
        if isinstance(value, dict) and below:
            return self._read_nested(value, row, self._enter_key(inner, place, ours, name), result, ours=bool(ours))
        if row is None and self._has_below(f"{inner.path}[]") and not self._is_ours(value, ours, name):
            self._read_items(value, inner, result)
            return _TAKEN
        if row is None and ours and self._is_unclear(value, inner.path):
            self._refuse_unclear(value, inner.at_index(0), result)
            return _TAKEN
        result.reads.append(self._make_read(inner, value, row))
        if row is not None and row.fate != "same":
            self._apply_row(row, value, inner, result)
            return _TAKEN
        if not ours and below:
            self._refuse_value(inner, f"got {show_value(value)}, expected a table", result)
            return _TAKEN
        if not ours and not place.models:
            self._refuse_value(inner, f"unknown field{self._known_names(name, place)}", result)
            return _TAKEN
        return value

    def _read_nested(
        self, value: dict[str, Any], row: Row | None, place: _Place, result: Translation, *, ours: bool
    ) -> Any:
        """Read a table key by key, and also as a whole if its row maps it or it is empty.

        Return the rest of it for our own reader, or `_TAKEN` if nothing is left. An empty table of ours is kept, as it enables something.
        """
        kept = row is None or row.fate == "same"
        if row is not None and not kept and (row.fate == "mapped" or not value):
            result.reads.append(self._make_read(place, value, row, table=True))
            self._apply_row(row, value, place, result)
        elif not value:
            result.reads.append(self._make_read(place, value, row, table=True))
        rest = self._read_table(value, place, result)
        return rest if rest or (ours and not value and kept) else _TAKEN

    def _make_read(self, place: _Place, value: object, row: Row | None, *, table: bool = False) -> Read:
        return Read(place.path, place.shown, value, row, self.lines.get(place.raw), table)

    def _is_ours(self, items: Any, ours: Sequence[type[BaseModel]], name: str) -> bool:
        """Return whether the items of a list have only keys of our field's items."""
        for model in ours:
            item = field_shapes(model)[find_field(model, self.aliases.get(name, name)) or ""].parts[0].model
            tables = items if isinstance(items, list) else [items]
            if item is not None and all(
                isinstance(item_table, dict) and all(find_field(item, key) is not None for key in item_table)
                for item_table in tables
            ):
                return True
        return False

    def _is_unclear(self, items: Any, path: str) -> bool:
        """Return whether the items of a list of ours have only keys that the dialect's list at this place has too."""
        names = self.dialect.names_below(f"{path}[]")
        return bool(items) and bool(names) and all(snake_name(key) in names for item in items for key in item)

    def _refuse_unclear(self, items: Sequence[Mapping[str, object]], place: _Place, result: Translation) -> None:
        given = " and ".join(f"{key} = {show_value(value)}" for key, value in items[0].items())
        self._refuse_value(place, f"got {f'only {given}' if given else 'an empty table'}: {_UNCLEAR}", result)
        # It is refused already. A stand-in environment prevents a second message about missing environments.
        origin = Origin(self.source, place.shown, self.lines.get(place.raw), self.style)
        self._apply_effect(Set("environments[].id", "reverse-text"), place.indices, origin, result)

    def _enter_key(self, inner: _Place, place: _Place, ours: Sequence[type[BaseModel]], name: str) -> _Place:
        models = [found for model in ours if (found := self._submodel(model, name)) is not None]
        shared = [self.model] if not place.path and snake_name(name) in ROLES else []
        return inner.with_models((*models, *shared))

    def _read_items(self, items: Any, place: _Place, result: Translation) -> None:
        if not isinstance(items, list):
            self._refuse_value(place, f"got {show_value(items)}, expected a list of tables", result)
            return
        has_environments = self._has_environments(f"{place.path}[]")
        for i, item in enumerate(items):
            inner = place.at_index(i)
            if isinstance(item, dict):
                if has_environments:  # each item is an environment, even if all its keys are refused
                    origin = Origin(self.source, inner.shown, self.lines.get(inner.raw), self.style)
                    self._apply_effect(Set("environments[]", {}), inner.indices, origin, result)
                self._read_table(item, inner.with_models(()), result)
            else:
                self._refuse_value(inner, f"got {show_value(item)}, expected a table", result)

    def _has_environments(self, item: str) -> bool:
        """Return whether the items of a list of the dialect become environments of ours."""
        below = (row.targets for row in self.dialect.rows if row.path.startswith(f"{item}."))
        return any(target.startswith("environments[]") for targets in below for target in targets)

    def _known_names(self, name: str, place: _Place) -> str:
        known = self.dialect.names_below(place.path)
        if self.fallback and not known:
            known = self.dialect.names_below(f"{self.fallback}.{place.path}")
        others = [other for other in known if other != snake_name(name)]
        return did_you_mean(snake_name(name), others) or f"; known: {list_few(others)}"

    def _refuse_value(self, place: _Place, message: str, result: Translation) -> None:
        result.layer.problems.append(Problem(self.source, place.shown, message, self.lines.get(place.raw)))

    def _apply_row(self, row: Row, value: Any, place: _Place, result: Translation) -> None:
        origin = Origin(self.source, place.shown, self.lines.get(place.raw), self.style)
        for effect in row.list_effects(value, place.path.rpartition(".")[2]):
            self._apply_effect(effect, place.indices, origin, result)

    def _apply_effect(self, effect: Effect, indices: tuple[int, ...], origin: Origin, result: Translation) -> None:
        layer, empty = result.layer, Problem(origin.source, origin.path, "", origin.line)
        match effect:
            case Set(path, value):
                self._mark_dialect(path, origin, layer)
                # Copy the value: it belongs to the row, and the layer may change it.
                result.assignments.append(Assignment(key_of(path, indices), copy.deepcopy(value), origin))
            case Extend(path, items):
                self._mark_dialect(path, origin, layer)
                key = key_of(path, indices)
                before = [*(item.value for item in result.assignments if item.key == key)]
                value = [*(before[-1] if before else []), *items]
                result.assignments = [item for item in result.assignments if item.key != key]
                result.assignments.append(Assignment(key, value, origin))
            case Note(text):
                self._mark_dialect("", origin, layer)
                layer.notices.append(replace(empty, message=text))
            case Refuse(text):
                self._mark_dialect("", origin, layer)
                layer.problems.append(replace(empty, message=text))
            case Later(label, value):
                self._mark_dialect("", origin, layer)
                layer.hints[label] = Hint(value, origin)

    def _mark_dialect(self, path: str, origin: Origin, layer: Layer) -> None:
        layer.hints.setdefault(DIALECT, Hint(self.dialect.name, origin))
        if path.startswith("environments["):
            layer.hints.setdefault(ENVIRONMENTS, Hint(True, origin))
        if path in ("inference.tensor_parallel", "inference.data_parallel"):
            layer.hints.setdefault(PARALLEL, Hint(True, origin))


def _path_of(words: Sequence[str]) -> str:
    return re.sub(r"\.\d+(?=\.|$)", "[]", ".".join(snake_name(word) for word in words))


_TAKEN: Any = object()


@dataclass(frozen=True)
class _Place:
    """A place in a document."""

    path: str
    """Dotted path, with `[]` for an item."""
    raw: Key
    shown: str
    indices: tuple[int, ...]
    models: tuple[type[BaseModel], ...]
    """Our models that may have its keys as fields; empty in a table that only the dialect has."""

    def at_key(self, name: str) -> _Place:
        path = f"{self.path}.{snake_name(name)}" if self.path else snake_name(name)
        shown = f"{self.shown}.{name}" if self.shown else name
        return _Place(path, (*self.raw, name), shown, self.indices, self.models)

    def at_index(self, index: int) -> _Place:
        shown = f"{self.shown}[{index}]"
        return _Place(f"{self.path}[]", (*self.raw, index), shown, (*self.indices, index), self.models)

    def with_models(self, models: Iterable[type[BaseModel]]) -> _Place:
        return _Place(self.path, self.raw, self.shown, self.indices, tuple(models))


def key_of(path: str, indices: Sequence[int] = ()) -> Key:
    """Return a target's path as a key: `[]` takes the next of the indices, `[0]` is the item itself."""
    rest = list(indices)
    key: list[str | int] = []
    for part in path.split("."):
        name, bracket, index = part.partition("[")
        key.append(name)
        if bracket:
            number = index.rstrip("]")
            key.append(int(number) if number else rest.pop(0) if rest else 0)
    return tuple(key)


def shape_at(model: type[BaseModel], key: Key) -> Shape | None:
    """Return the shape of a field, or None if there is no such field. Anything inside a free-form field has shape `any`."""
    shape = Shape("model", model=model)
    for part in key:
        if shape.kind == "model" and shape.model is not None:
            known = field_shapes(shape.model)
            if part not in known:
                return None
            shape = known[str(part)]
        elif shape.kind in ("list", "mapping"):
            shape = shape.parts[0]
        elif shape.kind not in ("any", "union"):
            return None
    return shape
