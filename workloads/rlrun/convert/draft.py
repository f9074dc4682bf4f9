"""A manifest in the making: fields with the keys that decided them, and the fate of every key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlrun.config.suggest import did_you_mean
from rlrun.convert.conversions import CONVERSIONS
from rlrun.convert.readers.setting import Setting
from rlrun.convert.tables.row import Row, row_of

Kind = Literal["taken", "mapped", "default", "dropped", "refused", "unknown"]
_MISSPELT = 0.8
"""Likeness (difflib) of two names of which one is taken for a misspelling of the other."""
_LEARNING = ("trainer.optimizer.", "trainer.scheduler.")
"""Beginnings of fields whose default in place of another choice would be another training."""
KINDS: Sequence[Kind] = ("taken", "mapped", "default", "dropped", "refused", "unknown")


@dataclass(frozen=True)
class Fate:
    """Fate of one key."""

    setting: Setting
    kind: Kind
    to: tuple[str, ...]
    """Fields that it decided."""
    note: str = ""


@dataclass
class Field:
    """One field of the manifest."""

    value: Any
    """Read back by what follows from it, which knows its type."""
    causes: tuple[str, ...]
    """Keys that decided it, as the other trainer spells them; those that were not written count with their default there."""
    note: str = ""
    items: tuple[tuple[str, ...], ...] = ()
    """Keys that decided each item of a list, where they are known apart."""


@dataclass
class Draft:
    """Fields below `spec` by dotted camelCase path, from settings by key."""

    trainer: str
    """The other trainer's name."""
    settings: Mapping[str, Setting]
    """By canonical key."""
    rows: Sequence[Row]
    defaults: Mapping[str, object]
    """The other trainer's defaults by key, where they matter."""
    fields: dict[str, Field] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Additions by the user; one line each."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons by key."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons by key, of keys that decide nothing with this value."""
    notices: list[str] = field(default_factory=list)
    _found: dict[str, Row | None] = field(default_factory=dict)

    def row(self, key: str) -> Row | None:
        """The row about a key."""
        if key not in self._found:
            self._found[key] = row_of(key, self.rows)
        return self._found[key]

    def has(self, key: str) -> bool:
        """True if the key is written with a value."""
        setting = self.settings.get(key)
        return setting is not None and setting.value is not None and not setting.unset

    def get(self, key: str) -> Any:
        """The value of a key, or the other trainer's default; None: neither."""
        return self.settings[key].value if self.has(key) else self.defaults.get(key)

    def number(self, key: str) -> float | None:
        """As `get`, as a number; a value that is none is missing."""
        found = self._converted("number", key)
        return None if found is None else float(found)

    def whole(self, key: str) -> int | None:
        """As `get`, as a whole number."""
        found = self._converted("whole", key)
        return None if found is None else int(found)

    def flag(self, key: str) -> bool:
        """As `get`, as true or false; false where there is neither."""
        return bool(self._converted("flag", key))

    def put(self, path: str, value: object, *causes: str, note: str = "") -> None:
        """Set a field, decided by these keys."""
        self.fields[path] = Field(value, causes, note)

    def _converted(self, conversion: str, key: str) -> Any:
        value = self.get(key)
        if value is None:
            return None
        try:
            return CONVERSIONS[conversion](value)
        except ValueError as error:
            self.missing.append(f"{key}: {error}")
            return self.defaults.get(key)

    def take_rows(self) -> None:
        """Set the fields of all rows of the kind `value`, of their defaults where nothing is written, and note what is refused."""
        for key, default in self.defaults.items():
            row = self.row(key)
            if row is not None and row.how == "value" and not self.has(key):
                self._take(key, row, default)
        for key, setting in self.settings.items():
            row = self.row(key)
            if row is None or setting.unset or setting.value is None:
                continue
            if row.how == "refuse" and not row.is_fine(setting.value):
                self.refused[key] = row.note
            elif row.how == "value" and not row.is_fine(setting.value):
                self._take(key, row, setting.value)

    def require_known(self, but: tuple[str, ...]) -> None:
        """Ask for values that a script computes while it runs, of keys that decide fields.

        Args:
            but: beginnings of keys whose value changes nothing that is learned.
        """
        told = {line.partition(":")[0] for line in self.missing}
        for key, setting in self.settings.items():
            row = self.row(key)
            if setting.unset and row is not None and row.to and not key.startswith(but) and setting.key not in told:
                unset = ", ".join(setting.unset)
                self.missing.append(f"{setting.key}: {unset} has no value that is known here; add {setting.key}=VALUE")

    def refuse_unknown(self, indifferent: tuple[str, ...]) -> None:
        """Refuse keys without a row that can change what is learned.

        Args:
            indifferent: beginnings of keys that cannot.
        """
        known = [row.key for row in self.rows if "*" not in row.key]
        for key, setting in self.settings.items():
            if self.row(key) is None and setting.value not in (None, {}, []) and not key.startswith(indifferent):
                self.refused[key] = (
                    f"not a key of {self.trainer} that this command knows{did_you_mean(key, known)}; if the run learns the same "
                    f"without it, take it out: ~{setting.key} on the command line"
                )

    def _take(self, key: str, row: Row, value: object) -> None:
        try:
            if row.values and not (isinstance(value, str) and value in row.values):
                reason = f"{row.to} has no such value; known: {', '.join(row.values)}"
                if row.to.startswith(_LEARNING):
                    self.refused[key] = reason
                    return
                self.dropped[key] = reason
                self.notices.append(f"{key}={value}: {reason}")
                return
            ours = row.values.get(value, value) if isinstance(value, str) else value
            ours = CONVERSIONS[row.convert](ours) if row.convert else ours
        except ValueError as error:
            self.missing.append(f"{key}: {error}")
            return
        if ours is None:
            self.dropped[key] = f"{value} means none there; {row.to} keeps its default"
        else:
            self.put(row.to, ours, key)

    def fates(self) -> list[Fate]:
        """The fate of every setting, in their order."""
        decided: dict[str, list[str]] = {}
        for path, there in self.fields.items():
            for key in there.causes:
                decided.setdefault(key, []).append(path)
        return [self._fate(key, setting, tuple(decided.get(key, ()))) for key, setting in self.settings.items()]

    def _fate(self, key: str, setting: Setting, to: tuple[str, ...]) -> Fate:
        row = self.row(key)
        if key in self.refused:
            return Fate(setting, "refused", (), self.refused[key])
        if row is None:
            hint = did_you_mean(key, [each.key for each in self.rows if "*" not in each.key])
            return Fate(setting, "unknown", (), f"not a key of {self.trainer} that this command knows{hint}; dropped")
        if to and setting.unset:
            return Fate(
                setting,
                "default",
                to,
                f"{', '.join(setting.unset)} has no value that is known here; {self.trainer}'s default",
            )
        if to and setting.value is None:
            return Fate(setting, "default", to, f"null: {self.trainer}'s default")
        if to:
            return Fate(setting, "taken" if self._is_same(to, setting) else "mapped", to, row.note)
        if key in self.dropped:
            return Fate(setting, "dropped", (), self.dropped[key])
        if setting.value is None:
            return Fate(setting, "default", (), "null: nothing is set")
        if row.is_fine(setting.value):
            return Fate(setting, "taken", (), row.note)
        return Fate(setting, "dropped", (), row.note or "no field here")

    def warnings(self) -> list[str]:
        """Notes on keys that are dropped though their value is another one than what RLRun does, and on values that nothing sets."""
        found = []
        for key, fate in zip(self.settings, self.fates(), strict=True):
            row = self.row(key)
            deviates = fate.kind == "dropped" and row is not None and bool(row.fine)
            if fate.kind == "dropped" and row is not None and (nearest := self._nearly(key, row)):
                found.append(f"{fate.setting.key}={fate.setting.shown}: dropped; did you mean {nearest}?")
            elif fate.kind == "unknown" or deviates or (fate.kind == "default" and fate.setting.unset):
                found.append(f"{fate.setting.key}={fate.setting.shown}: {fate.note}")
        return found

    def _nearly(self, key: str, row: Row) -> str | None:
        """The key that a misspelt one is nearly, where only a wide row is about it."""
        if not row.key.endswith(".*"):
            return None
        exact = (each.key for each in self.rows if "*" not in each.key and each.how != "drop")
        return next((other for other in exact if _is_misspelled(key, other)), None)

    def _is_same(self, to: tuple[str, ...], setting: Setting) -> bool:
        return len(to) == 1 and self.fields[to[0]].value == setting.value


def _is_misspelled(key: str, other: str) -> bool:
    """True if two keys differ in one part, and that hardly."""
    parts, others = key.split("."), other.split(".")
    apart = [(a, b) for a, b in zip(parts, others, strict=False) if a != b]
    if len(parts) != len(others) or len(apart) != 1:
        return False
    return difflib.SequenceMatcher(None, *apart[0]).ratio() >= _MISSPELT
