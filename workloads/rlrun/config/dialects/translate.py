"""A document or an option of another project as assignments to our fields, with the place of each value."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rlrun.config.dialects.rows import Dialect, Effect, Extend, Later, Note, Refuse, Row, Set
from rlrun.config.dialects.values import show_value
from rlrun.config.loading.layers import Assignment, Hint, Layer, Origin, assign_values
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.schema import Shape, Style, field_shapes, find_field, list_few, snake_name
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean

_LEVELS_MAX = 32
DIALECT = "dialect"
"""Hint: something was said in another project's names."""
ENVIRONMENTS = "environments"
"""Hint: environments were."""
PARALLEL = "parallel"
"""Hint: the parallelism of the engines was, which there are always on GPUs."""
ROLES = ("trainer", "orchestrator", "inference")
_UNCLEAR = "an environment needs id or taskset, and a variable of the process needs value or valueFrom"
"""Need of an item of `orchestrator.env` that may be either: the one list that both sides have, which is read by its items' keys."""


@dataclass(frozen=True)
class Read:
    """One key of a document, as it was read."""

    path: str
    """Dotted, with `[]` for an item."""
    shown: str
    """The key as the user wrote it."""
    value: object
    row: Row | None
    """None: a key of ours, or of nobody."""
    line: int | None
    table: bool = False
    """True for a table whose keys are read one by one beside it."""


@dataclass
class Translation:
    """Contents of a document in our names, and the rest of it for our own reader."""

    assignments: list[Assignment] = field(default_factory=list)
    layer: Layer = field(default_factory=Layer)
    """Problems, notices and hints."""
    rest: dict[str, Any] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    """Every key that was read."""

    def as_layer(self, model: type[BaseModel]) -> Layer:
        """The assignments as a layer of `model`, with all that was found."""
        assign_values(self.layer, model, self.assignments)
        return self.layer


@dataclass(frozen=True)
class Translator:
    """Reading of one source in another project's names."""

    dialect: Dialect
    model: type[BaseModel]
    """Description of a run."""
    source: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    style: Style = "snake"
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields of ours."""
    fallback: str = ""
    """Table whose keys may stand at the top, as the trainer's in a file of supervised fine-tuning."""

    def read(self, document: Mapping[str, Any], table: str = "", raw: Key = (), shown: str = "") -> Translation:
        """Contents of a document.

        Args:
            document: a whole file, or the part of one role.
            table: the role whose part it is; empty for the whole run.
            raw: place of the part in the file, for lines.
            shown: how the user calls the place of the part.
        """
        result = Translation()
        models = [model for part in (table,) if part and (model := self._below(self.model, part)) is not None]
        place = _Place(table, raw, shown, (), (*models, self.model))
        result.rest = self._table(dict(document), place, result)
        return result

    def knows(self, words: Sequence[str]) -> bool:
        """True if an option or variable of these words is the dialect's, and not a field of ours as it is."""
        row, _ = self._covering(words)
        return row is not None and row.fate != "same"

    def option(self, words: Sequence[str], value: Any, shown: str) -> Translation | None:
        """Meaning of an option or variable; None if no row knows it."""
        row, count = self._covering(words)
        if row is None:
            return None
        for word in reversed(words[count:]):
            value = {word: value}
        result = Translation()
        indices = tuple(int(word) for word in words[:count] if word.isdecimal())
        self._apply(row, value, _Place(_path_of(words[:count]), (), shown, indices, ()), result)
        return result

    def items(self, words: Sequence[str], value: object, shown: str) -> Translation | None:
        """Meaning of an option whose value is a list of the dialect's tables; None if it is not, or the tables are ours as they are."""
        path, model = _path_of(words), self.model
        if (
            not isinstance(value, list)
            or not all(isinstance(one, dict) for one in value)
            or not self._has_below(f"{path}[]")
        ):
            return None
        for word in words[:-1]:
            if (below := self._below(model, word)) is None:
                break
            model = below
        else:
            if find_field(model, words[-1]) is not None and self._is_ours(value, [model], words[-1]):
                if not self._is_unclear(value, path):
                    return None
                result = Translation()
                self._refuse_unclear(value, _Place(path, (), shown, (), ()).item(0), result)
                return result
        result = Translation()
        self._items(value, _Place(path, (), shown, (), ()), result)
        whole = Layer()
        assign_values(whole, self.model, result.assignments)
        listed = {one.key[0] for one in result.assignments if len(one.key) > 1 and isinstance(one.key[1], int)}
        others = [one for one in result.assignments if one.key[0] not in listed]
        result.layer.origins |= {key: one for key, one in whole.origins.items() if len(key) > 1 and key[0] in listed}
        origin = Origin(self.source, shown, None, self.style)  # a list replaces the one below it, as any list does
        result.assignments = [
            *others,
            *(Assignment((name,), whole.values[str(name)], origin) for name in sorted(listed, key=str)),
        ]
        return result

    def _covering(self, words: Sequence[str]) -> tuple[Row | None, int]:
        """The row of dotted words, or of the table around them that it covers as a whole; and how many words it has."""
        for count in range(len(words), 0, -1):
            path = _path_of(words[:count])
            row = self._find(path)
            if row is not None and (count == len(words) or not self._has_below(path)):
                return row, count
        return None, 0

    def _find(self, path: str) -> Row | None:
        row = self.dialect.find(path)
        return self.dialect.find(f"{self.fallback}.{path}") if row is None and self.fallback else row

    def _has_below(self, path: str) -> bool:
        has = self.dialect.has_below
        return has(path) or (bool(self.fallback) and has(f"{self.fallback}.{path}"))

    def _below(self, model: type[BaseModel], name: str) -> type[BaseModel] | None:
        known = find_field(model, self.aliases.get(name, name))
        return None if known is None else field_shapes(model)[known].model

    def _table(self, table: dict[str, Any], place: _Place, result: Translation) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in table.items():
            inner = place.inside(name)
            kept = self._key(name, value, inner, place, result)
            if kept is not _TAKEN:
                rest[name] = kept
        return rest

    def _key(self, name: str, value: Any, inner: _Place, place: _Place, result: Translation) -> Any:
        row = self._find(inner.path)
        below = self._has_below(inner.path) and len(inner.raw) < _LEVELS_MAX
        ours = [model for model in place.models if find_field(model, self.aliases.get(name, name)) is not None]
        if isinstance(value, dict) and below:
            return self._nested(value, row, self._inside(inner, place, ours, name), result, ours=bool(ours))
        if row is None and self._has_below(f"{inner.path}[]") and not self._is_ours(value, ours, name):
            self._items(value, inner, result)
            return _TAKEN
        if row is None and ours and self._is_unclear(value, inner.path):
            self._refuse_unclear(value, inner.item(0), result)
            return _TAKEN
        result.reads.append(self._read(inner, value, row))
        if row is not None and row.fate != "same":
            self._apply(row, value, inner, result)
            return _TAKEN
        if not ours and below:
            self._refuse(inner, f"got {show_value(value)}, expected a table", result)
            return _TAKEN
        if not ours and not place.models:
            self._refuse(inner, f"unknown field{self._known(name, place)}", result)
            return _TAKEN
        return value

    def _nested(self, value: dict[str, Any], row: Row | None, place: _Place, result: Translation, *, ours: bool) -> Any:
        """Read a table key by key, and as a whole where its row maps it or it is empty.

        Return what is left of it for our own reader; `_TAKEN`: nothing. An empty table of ours is kept: it switches something on.
        """
        kept = row is None or row.fate == "same"
        if row is not None and not kept and (row.fate == "mapped" or not value):
            result.reads.append(self._read(place, value, row, table=True))
            self._apply(row, value, place, result)
        elif not value:
            result.reads.append(self._read(place, value, row, table=True))
        rest = self._table(value, place, result)
        return rest if rest or (ours and not value and kept) else _TAKEN

    def _read(self, place: _Place, value: object, row: Row | None, *, table: bool = False) -> Read:
        return Read(place.path, place.shown, value, row, self.lines.get(place.raw), table)

    def _is_ours(self, items: Any, ours: Sequence[type[BaseModel]], name: str) -> bool:
        """True for a list whose items have no other keys than those of our field of that name."""
        for model in ours:
            item = field_shapes(model)[find_field(model, self.aliases.get(name, name)) or ""].parts[0].model
            tables = items if isinstance(items, list) else [items]
            if item is not None and all(
                isinstance(one, dict) and all(find_field(item, key) is not None for key in one) for one in tables
            ):
                return True
        return False

    def _is_unclear(self, items: Any, path: str) -> bool:
        """True for a list of ours whose items have no other keys than those of the dialect's list at this place."""
        names = self.dialect.names_below(f"{path}[]")
        return bool(items) and bool(names) and all(snake_name(key) in names for one in items for key in one)

    def _refuse_unclear(self, items: Sequence[Mapping[str, object]], place: _Place, result: Translation) -> None:
        given = " and ".join(f"{key} = {show_value(value)}" for key, value in items[0].items())
        self._refuse(place, f"got {f'only {given}' if given else 'an empty table'}: {_UNCLEAR}", result)
        # Refused it is; with an environment in its place nobody says beside it that there is none.
        origin = Origin(self.source, place.shown, self.lines.get(place.raw), self.style)
        self._take(Set("environments[].id", "reverse-text"), place.indices, origin, result)

    def _inside(self, inner: _Place, place: _Place, ours: Sequence[type[BaseModel]], name: str) -> _Place:
        models = [found for model in ours if (found := self._below(model, name)) is not None]
        shared = [self.model] if not place.path and snake_name(name) in ROLES else []
        return inner.among((*models, *shared))

    def _items(self, items: Any, place: _Place, result: Translation) -> None:
        if not isinstance(items, list):
            self._refuse(place, f"got {show_value(items)}, expected a list of tables", result)
            return
        played = self._has_environments(f"{place.path}[]")
        for i, item in enumerate(items):
            inner = place.item(i)
            if isinstance(item, dict):
                if played:  # an environment is one, whatever its keys become
                    origin = Origin(self.source, inner.shown, self.lines.get(inner.raw), self.style)
                    self._take(Set("environments[]", {}), inner.indices, origin, result)
                self._table(item, inner.among(()), result)
            else:
                self._refuse(inner, f"got {show_value(item)}, expected a table", result)

    def _has_environments(self, item: str) -> bool:
        """True if the items of a list of the dialect are environments of ours."""
        below = (row.targets for row in self.dialect.rows if row.path.startswith(f"{item}."))
        return any(target.startswith("environments[]") for targets in below for target in targets)

    def _known(self, name: str, place: _Place) -> str:
        known = self.dialect.names_below(place.path)
        if self.fallback and not known:
            known = self.dialect.names_below(f"{self.fallback}.{place.path}")
        others = [one for one in known if one != snake_name(name)]
        return did_you_mean(snake_name(name), others) or f"; known: {list_few(others)}"

    def _refuse(self, place: _Place, message: str, result: Translation) -> None:
        result.layer.problems.append(Problem(self.source, place.shown, message, self.lines.get(place.raw)))

    def _apply(self, row: Row, value: Any, place: _Place, result: Translation) -> None:
        origin = Origin(self.source, place.shown, self.lines.get(place.raw), self.style)
        for effect in row.effects(value, place.path.rpartition(".")[2]):
            self._take(effect, place.indices, origin, result)

    def _take(self, effect: Effect, indices: tuple[int, ...], origin: Origin, result: Translation) -> None:
        layer, said = result.layer, Problem(origin.source, origin.path, "", origin.line)
        match effect:
            case Set(path, value):
                self._mark(path, origin, layer)
                # A row's own value must not change with the layer that it is put into.
                result.assignments.append(Assignment(key_of(path, indices), copy.deepcopy(value), origin))
            case Extend(path, items):
                self._mark(path, origin, layer)
                key = key_of(path, indices)
                before = [*(one.value for one in result.assignments if one.key == key)]
                value = [*(before[-1] if before else []), *items]
                result.assignments = [one for one in result.assignments if one.key != key]
                result.assignments.append(Assignment(key, value, origin))
            case Note(text):
                self._mark("", origin, layer)
                layer.notices.append(Problem(said.source, said.path, text, said.line))
            case Refuse(text):
                self._mark("", origin, layer)
                layer.problems.append(Problem(said.source, said.path, text, said.line))
            case Later(label, value):
                self._mark("", origin, layer)
                layer.hints[label] = Hint(value, origin)

    def _mark(self, path: str, origin: Origin, layer: Layer) -> None:
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
    """Dotted, with `[]` for an item."""
    raw: Key
    shown: str
    indices: tuple[int, ...]
    models: tuple[type[BaseModel], ...]
    """Models of ours that its keys may be fields of; none in a table that only the dialect has."""

    def inside(self, name: str) -> _Place:
        path = f"{self.path}.{snake_name(name)}" if self.path else snake_name(name)
        shown = f"{self.shown}.{name}" if self.shown else name
        return _Place(path, (*self.raw, name), shown, self.indices, self.models)

    def item(self, index: int) -> _Place:
        shown = f"{self.shown}[{index}]"
        return _Place(f"{self.path}[]", (*self.raw, index), shown, (*self.indices, index), self.models)

    def among(self, models: Iterable[type[BaseModel]]) -> _Place:
        return _Place(self.path, self.raw, self.shown, self.indices, tuple(models))


def key_of(path: str, indices: Sequence[int] = ()) -> Key:
    """A target's path as a key: `[]` is the next of the indices, `[0]` the item itself."""
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
    """The shape of a field, None if there is none; what lies in a free-form one has a shape of anything."""
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
