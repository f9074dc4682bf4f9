"""Configurations of a run's attempts from its folder, and the changes between consecutive attempts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from pydantic_core import to_jsonable_python

from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, RoleConfig, TrainerConfig
from rlrun.inspect.comparison import PLACES, flatten_config
from rlrun.inspect.snapshot import format_rfc3339
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom

ATTEMPTS_MAX = 200
"""Maximum number of attempts that are read; the newest are used."""
_BYTES_MAX = 4 << 20
_ABSENT = "–"
_STARTS = "checkpoint.resume"
"""Field that defines where an attempt starts, not its computation: a restart changes it automatically."""
_ROLES: Mapping[str, type[RoleConfig]] = {
    "trainer": TrainerConfig,
    "inference": InferenceConfig,
    "orchestrator": OrchestratorConfig,
}
Config = Mapping[str, object]
"""Sections of `run.json` by name."""


@dataclass(frozen=True)
class Kept:
    """Record of an attempt."""

    attempt: int
    first_step: int
    """First step of the attempt."""
    started: str | None
    """Start time (RFC 3339)."""
    fingerprint: str
    """Hash of all inputs of the computation; empty if unknown."""
    config: Config | None
    """Configuration, or None if the folder does not contain it."""


@dataclass(frozen=True)
class Change:
    """Field with different values."""

    field: str
    before: str
    after: str


@dataclass(frozen=True)
class Edit:
    """Configuration change before an attempt."""

    attempt: int
    first_step: int
    started: str | None
    changes: tuple[Change, ...]
    known: bool
    """Whether the changed fields are known; False: only the fact of a change is known."""


def attempts_kept(
    paths: RunPaths, opened: Callable[[Path], BinaryIO], fork: ForkedFrom | None, clean: Callable[[Config], Config]
) -> list[Kept]:
    """Return the records of the newest attempts, in order.

    Args:
        paths: paths of the run.
        opened: function that opens a file for reading.
        fork: origin of a fork; the attempt that was copied from it is excluded.
        clean: function that removes secrets.
    """
    found: list[Kept] = []
    last: tuple[bytes, Config | None] = (b"", None)
    numbers = [n for n in paths.attempts_on_disk() if fork is None or n > fork.attempt]
    for number in numbers[-ATTEMPTS_MAX:]:
        content = _file_content(paths.attempt_config(number), opened)
        if content != last[0]:
            document = _read_document(content)
            last = (content, clean(document) if document else None)
        config = last[1] or _by_hand(paths, number, opened, clean)
        record = _read_document(_file_content(paths.attempt_file(number), opened))
        base, began, mark = (record.get(name) for name in ("base_step", "started_at", "config_hash"))
        found.append(
            Kept(
                number,
                base + 1 if isinstance(base, int) else 1,
                format_rfc3339(began) if isinstance(began, int | float) and 0 <= began < 1e11 else None,
                mark if isinstance(mark, str) else "",
                config,
            )
        )
    return found


def _by_hand(
    paths: RunPaths, attempt: int, opened: Callable[[Path], BinaryIO], clean: Callable[[Config], Config]
) -> Config | None:
    """Return the configuration of roles that were started by hand, each with its own file."""
    sections: dict[str, object] = {}
    for role in ("trainer", "orchestrator"):
        if document := _read_document(_file_content(paths.logs(attempt, role) / "config.json", opened)):
            sections[role] = document.get(role, document)
    return clean(sections) if sections else None


def _file_content(path: Path, opened: Callable[[Path], BinaryIO]) -> bytes:
    try:
        with opened(path) as file:
            content = file.read(_BYTES_MAX + 1)
    except OSError:
        return b""
    return content if len(content) <= _BYTES_MAX else b""


def _read_document(content: bytes) -> dict[str, object]:
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
        if isinstance(document, dict):
            return document
    return {}


def list_edits(kept: Sequence[Kept]) -> list[Edit]:
    """Return the attempts whose configuration differs from the previous attempt's, newest first."""
    found = []
    for before, after in pairwise(kept):
        known = before.config is not None and after.config is not None
        changed = changed_fields(before.config or {}, after.config or {}) if known else ()
        unsaid = (
            not known and bool(before.fingerprint and after.fingerprint) and before.fingerprint != after.fingerprint
        )
        if changed or unsaid:
            found.append(Edit(after.attempt, after.first_step, after.started, changed, known))
    return found[::-1]


def changed_fields(before: Config, after: Config) -> tuple[Change, ...]:
    """Return the fields that differ between two configurations, without location fields and the start of the attempt.

    A field that the release of the first configuration did not have is not a change if it has its default. A field that all roles share is
    listed once without a role if it changed equally in all of them. Roles that exist in only one of the configurations are skipped: if
    roles are started by hand, an engine can continue without a new record.
    """
    sections = [name for name in before if name in after]
    one, other = ({name: _config_fields(config.get(name)) for name in sections} for config in (before, after))
    for section in sections:
        known = _default_fields(section)
        one[section] |= {
            field: text
            for field, text in other[section].items()
            if field not in one[section] and known.get(field) == text
        }
    owners: dict[str, list[str]] = {}
    changed: dict[tuple[str, str, str], list[str]] = {}
    for section in sections:
        for field in dict.fromkeys([*one[section], *other[section]]):
            owners.setdefault(field, []).append(section)
            old, new = one[section].get(field, _ABSENT), other[section].get(field, _ABSENT)
            if old != new:
                changed.setdefault((field, old, new), []).append(section)
    found = []
    for (field, old, new), where in changed.items():
        names = [field] if field and where == owners[field] else [f"{name}.{field}".rstrip(".") for name in where]
        found += [Change(name, old, new) for name in names]
    return tuple(sorted(found, key=lambda change: change.field))


@cache
def _default_fields(section: str) -> Mapping[str, str]:
    """Return the defaults of a role's fields by path; empty for other sections."""
    role = _ROLES.get(section)
    if role is None:
        return {}
    known = {
        name: info.get_default(call_default_factory=True, validated_data={})
        for name, info in role.model_fields.items()
        if not info.is_required()
    }
    return _config_fields(to_jsonable_python(known))


def _config_fields(section: object) -> dict[str, str]:
    return {
        field: text
        for field, text in flatten_config(section).items()
        if field not in PLACES and field != _STARTS and not field.startswith(f"{_STARTS}.")
    }


def describe_changes(kept: Sequence[Kept], found: Sequence[Edit]) -> str:
    """Return one sentence about the changes of a run."""
    count = len(kept)
    if count == 0:
        return "No attempt has started yet, so there are no changes."
    if count == 1:
        return "Never edited: the run has had one attempt."
    lacking = [one.attempt for one in kept if one.config is None]
    if found:
        return f"Edited {_count_times(len(found))} in {count} attempts."
    if not lacking:
        return f"Never edited: all {count} attempts started with the same configuration."
    if all(one.fingerprint and one.fingerprint == kept[0].fingerprint for one in kept):
        return (
            f"Never edited: all {count} attempts started with the same configuration, according to their fingerprints."
        )
    return f"The configuration of attempt {lacking[0]} was not saved, so it is unknown whether the run was edited."


def _count_times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"
