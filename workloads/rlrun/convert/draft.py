"""Draft of a manifest: its fields with the keys that decided them, and the result of every key.

The first part has the conversions of single values, to which the tables refer by name. A `ValueError` of a conversion contains the reason
why the value has no counterpart in RLRun.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlrun.config.suggest import did_you_mean
from rlrun.convert.readers.hydra import Setting
from rlrun.convert.tables.row import Row, row_of


def read_number(value: object) -> float:
    """Convert a number, or a text with a number."""
    if isinstance(value, bool):
        raise ValueError(f"got {value}, expected a number")
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"got {str(value)[:40]!r}, expected a number")
    return found


def read_whole(value: object) -> int:
    """Convert a whole number, or a text such as `8` or `1e3`."""
    found = read_number(value)
    if found != int(found):
        raise ValueError(f"got {value}, expected a whole number")
    return int(found)


def read_positive(value: object) -> int | None:
    """Convert a whole number from 1; returns None for 0 and below, which mean off or unlimited in other trainers."""
    found = read_whole(value)
    return found if found > 0 else None


def read_flag(value: object) -> bool:
    """Convert true or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"got {str(value)[:40]!r}, expected true or false")


def read_checkpointing(value: object) -> str:
    """Convert recomputation of activations: `full` or `none`."""
    return "full" if read_flag(value) else "none"


def read_replay(value: object) -> str | None:
    """Convert the switch of replayed experts: `Rollout`, or None if it is off."""
    return "Rollout" if read_flag(value) else None


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "number": read_number,
    "whole": read_whole,
    "positive": read_positive,
    "flag": read_flag,
    "checkpointing": read_checkpointing,
    "replay": read_replay,
}


Kind = Literal["taken", "mapped", "default", "dropped", "refused", "unknown"]
_MISSPELT = 0.8
"""Minimum similarity (difflib) of two names to suggest one as the correct spelling of the other."""
_LEARNING = ("trainer.optimizer.", "trainer.scheduler.")
"""Prefixes of fields whose default instead of an unsupported value would change the training."""
KINDS: Sequence[Kind] = ("taken", "mapped", "default", "dropped", "refused", "unknown")


@dataclass(frozen=True)
class Fate:
    """Result of one key."""

    setting: Setting
    kind: Kind
    to: tuple[str, ...]
    """Fields that the key decided."""
    note: str = ""


@dataclass
class Field:
    """One field of the manifest."""

    value: Any
    """Value; code that derives other fields from it must know its type."""
    causes: tuple[str, ...]
    """Keys that decided the field, in the other trainer's spelling, including unset keys with their default."""
    note: str = ""
    items: tuple[tuple[str, ...], ...] = ()
    """Keys that decided each item of a list, if they are known separately."""


@dataclass
class Draft:
    """Fields below `spec` by dotted camelCase path, derived from settings by key."""

    trainer: str
    """Name of the other trainer."""
    settings: Mapping[str, Setting]
    """Settings by canonical key."""
    rows: Sequence[Row]
    defaults: Mapping[str, object]
    """The other trainer's relevant defaults by key."""
    fields: dict[str, Field] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Values that the user must add, one line each."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons for refused keys."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons for keys that decide nothing with this value."""
    notices: list[str] = field(default_factory=list)
    _found: dict[str, Row | None] = field(default_factory=dict)

    def find_row(self, key: str) -> Row | None:
        """Return the table row for a key, or None."""
        if key not in self._found:
            self._found[key] = row_of(key, self.rows)
        return self._found[key]

    def has_value(self, key: str) -> bool:
        """Return whether the key is set to a value."""
        setting = self.settings.get(key)
        return setting is not None and setting.value is not None and not setting.unset

    def get(self, key: str) -> Any:
        """Return the value of a key, or the other trainer's default, or None."""
        return self.settings[key].value if self.has_value(key) else self.defaults.get(key)

    def written_key(self, key: str) -> str:
        """Return a key in the spelling of the file; for an unset key, the canonical one."""
        setting = self.settings.get(key)
        return key if setting is None else setting.key

    def get_number(self, key: str) -> float | None:
        """Return `get` as a number; a value of another type is reported as missing."""
        found = self._get_converted("number", key)
        return None if found is None else float(found)

    def get_integer(self, key: str) -> int | None:
        """Return `get` as a whole number."""
        found = self._get_converted("whole", key)
        return None if found is None else int(found)

    def get_flag(self, key: str) -> bool:
        """Return `get` as a boolean; false if there is neither a value nor a default."""
        return bool(self._get_converted("flag", key))

    def set_field(self, path: str, value: object, *causes: str, note: str = "") -> None:
        """Set a field, with the keys that decided it."""
        self.fields[path] = Field(value, causes, note)

    def _get_converted(self, conversion: str, key: str) -> Any:
        value = self.get(key)
        if value is None:
            return None
        try:
            return CONVERSIONS[conversion](value)
        except ValueError as error:
            self.missing.append(f"{self.written_key(key)}: {error}")
            return self.defaults.get(key)

    def take_rows(self) -> None:
        """Set the fields of all `value` rows, from settings or otherwise defaults, and record refused keys."""
        for key, default in self.defaults.items():
            row = self.find_row(key)
            if row is not None and row.how == "value" and not self.has_value(key):
                self._convert_key(key, row, default)
        for key, setting in self.settings.items():
            row = self.find_row(key)
            if row is None or setting.unset or setting.value is None:
                continue
            if row.how == "refuse" and not row.is_fine(setting.value):
                self.refused[key] = row.note
            elif row.how == "value" and not row.is_fine(setting.value):
                self._convert_key(key, row, setting.value)

    def require_known(self, but: tuple[str, ...]) -> None:
        """Report values that a script computes at runtime, for keys that decide fields.

        Args:
            but: prefixes of keys that do not change the training result.
        """
        told = {line.partition(":")[0] for line in self.missing}
        for key, setting in self.settings.items():
            row = self.find_row(key)
            if setting.unset and row is not None and row.to and not key.startswith(but) and setting.key not in told:
                unset = ", ".join(setting.unset)
                self.missing.append(f"{setting.key}: {unset} has no known value; add {setting.key}=VALUE")

    def refuse_unknown(self, indifferent: tuple[str, ...]) -> None:
        """Refuse unknown keys that can change the training result.

        Args:
            indifferent: prefixes of keys that cannot change it.
        """
        known = [row.key for row in self.rows if "*" not in row.key]
        for key, setting in self.settings.items():
            if self.find_row(key) is None and setting.value not in (None, {}, []) and not key.startswith(indifferent):
                self.refused[key] = (
                    f"unknown key of {self.trainer}{did_you_mean(key, known)}; if it does not affect the training, "
                    f"delete it with ~{setting.key} on the command line"
                )

    def _convert_key(self, key: str, row: Row, value: object) -> None:
        try:
            if row.values and not (isinstance(value, str) and value in row.values):
                reason = f"{row.to} does not support this value; known: {', '.join(row.values)}"
                if row.to.startswith(_LEARNING):
                    self.refused[key] = reason
                    return
                self.dropped[key] = reason
                self.notices.append(f"{self.written_key(key)}={value}: {reason}")
                return
            ours = row.values.get(value, value) if isinstance(value, str) else value
            ours = CONVERSIONS[row.convert](ours) if row.convert else ours
        except ValueError as error:
            self.missing.append(f"{self.written_key(key)}: {error}")
            return
        if ours is None:
            self.dropped[key] = f"{value} means unset; {row.to} keeps its default"
        else:
            self.set_field(row.to, ours, key)

    def fates(self) -> list[Fate]:
        """Return the result of every setting, in their order."""
        decided: dict[str, list[str]] = {}
        for path, there in self.fields.items():
            for key in there.causes:
                decided.setdefault(key, []).append(path)
        return [self._find_fate(key, setting, tuple(decided.get(key, ()))) for key, setting in self.settings.items()]

    def _find_fate(self, key: str, setting: Setting, to: tuple[str, ...]) -> Fate:
        row = self.find_row(key)
        if key in self.refused:
            return Fate(setting, "refused", (), self.refused[key])
        if row is None:
            hint = did_you_mean(key, [each.key for each in self.rows if "*" not in each.key])
            return Fate(setting, "unknown", (), f"unknown key of {self.trainer}{hint}; dropped")
        if to and setting.unset:
            return Fate(
                setting,
                "default",
                to,
                f"{', '.join(setting.unset)} has no known value; {self.trainer}'s default",
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
        return Fate(setting, "dropped", (), row.note or "no field in RLRun")

    def list_warnings(self) -> list[str]:
        """Return notices about dropped keys with a value other than RLRun's behavior, and about values without a known source."""
        found = []
        for key, fate in zip(self.settings, self.fates(), strict=True):
            row = self.find_row(key)
            deviates = fate.kind == "dropped" and row is not None and bool(row.fine)
            if fate.kind == "dropped" and row is not None and (nearest := self._similar_key(key, row)):
                found.append(f"{fate.setting.key}={fate.setting.shown}: dropped; did you mean {nearest}?")
            elif fate.kind == "unknown" or deviates or (fate.kind == "default" and fate.setting.unset):
                found.append(f"{fate.setting.key}={fate.setting.shown}: {fate.note}")
        return found

    def _similar_key(self, key: str, row: Row) -> str | None:
        """Return the similar key for a possibly misspelled key that only a wildcard row matches."""
        if not row.key.endswith(".*"):
            return None
        exact = (each.key for each in self.rows if "*" not in each.key and each.how != "drop")
        return next((other for other in exact if _is_misspelled(key, other)), None)

    def _is_same(self, to: tuple[str, ...], setting: Setting) -> bool:
        return len(to) == 1 and self.fields[to[0]].value == setting.value


def _is_misspelled(key: str, other: str) -> bool:
    """Return whether two keys differ slightly in exactly one part."""
    parts, others = key.split("."), other.split(".")
    apart = [(a, b) for a, b in zip(parts, others, strict=False) if a != b]
    if len(parts) != len(others) or len(apart) != 1:
        return False
    return difflib.SequenceMatcher(None, *apart[0]).ratio() >= _MISSPELT
