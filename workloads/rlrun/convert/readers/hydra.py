"""Hydra's configuration: settings of files and command lines.

In the order of the file: one setting with its origin; the files that `--config-path`, `--config-name` and lists of defaults refer to; YAML
with interpolations, and `key=value` overrides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.loading.yaml_text import examine_yaml, parse_yaml
from rlrun.runtime import redact


@dataclass(frozen=True)
class Setting:
    """One key with its value and origin."""

    key: str
    """Dotted key in the other trainer's spelling, without Hydra's `+`."""
    value: object
    """JSON value after variables and interpolations."""
    source: str
    line: int | None = None
    unset: tuple[str, ...] = ()
    """Variables and interpolations in the value without a known value."""

    @property
    def shown(self) -> object:
        """Value without secrets, for messages and comments."""
        return redact.redact_document(self.value, [], self.key)


def refuse_file(source: str, message: str, line: int | None = None, path: str = "") -> ConfigError:
    """Return an error with one problem, ready to raise."""
    return ConfigError([Problem(source, path, message, line)])


def latest_settings(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by key; a later setting replaces an earlier one with the same key."""
    return {setting.key: setting for setting in settings}


LISTED = "defaults."
"""Prefix of the key of a setting for an unread file in a list of defaults."""
NAME_OPTIONS = ("--config-name", "-cn")
PATH_OPTIONS = ("--config-path", "-cp", "--config-dir", "-cd")
_PROGRAMS_OWN = ("", "config", "./config", "verl/trainer/config")
"""Values of `--config-path` for the folder of the program's own configurations."""
_PARENTS = 5
"""Number of folders above a script that can be the root of a relative path: scripts of a repository run from its root."""


def named_configuration(settings: Sequence[Setting]) -> tuple[str, str] | None:
    """Return folder and name of the configuration that a script's settings refer to, or None."""
    values = {one.key: str(one.value) for one in settings if one.value is not None}
    name = next((values[key] for key in NAME_OPTIONS if key in values), None)
    folder = next((values[key] for key in PATH_OPTIONS if key in values), "")
    return None if name is None else (folder.rstrip("/"), PurePath(name).name.removesuffix(".yaml"))


def is_programs_own(folder: str) -> bool:
    """Return whether a folder of `--config-path` contains the program's own configurations."""
    return folder in _PROGRAMS_OWN or folder.endswith("verl/trainer/config")


def possible_files(folder: str, name: str, script: Path) -> Iterator[Path]:
    """Yield the possible paths of a configuration, most likely first.

    Args:
        folder: value of `--config-path`, without variables that have no value.
        name: value of `--config-name`, without a suffix.
        script: absolute path of the script.
    """
    file = f"{name}.yaml"
    if folder.startswith("/"):
        yield Path(folder) / file
    below = folder.lstrip("/")
    for root in (Path.cwd(), script.parent, *script.parents[1:_PARENTS]):
        yield root / below / file
    if not is_programs_own(folder):
        yield script.parent / PurePath(below).name / file
    yield script.parent / "config" / file


def is_listed(key: str) -> bool:
    """Return whether a key belongs to a list of defaults."""
    return key == "defaults" or key.startswith(LISTED) or re.fullmatch(r"defaults\[\d+\]", key) is not None


def listed_files(settings: Sequence[Setting]) -> list[str]:
    """Return the entries of a file's lists of defaults, in their order; `_self_` is the file itself."""
    found: list[str] = []
    for one in settings:
        if is_listed(one.key):
            found += [str(item) for item in (one.value if isinstance(one.value, list) else [one.value])]
    return found


def default_file(entry: str, folder: Path) -> Path | None:
    """Return the path of a file in a list of defaults, or None if its keys do not belong to the root.

    Args:
        entry: entry of the list, such as `../math/base@_global_`.
        folder: folder of the file with the list.
    """
    name, _, package = entry.partition("@")
    return (folder / name).with_suffix(".yaml") if package in ("", "_global_") else None


def without_lists(settings: Sequence[Setting], unread: Sequence[str]) -> list[Setting]:
    """Return settings without their lists of defaults, plus one setting for each unread file in them."""
    lists = [one for one in settings if is_listed(one.key)]
    kept = [one for one in settings if not is_listed(one.key)]
    return [*kept, *(replace(lists[0], key=LISTED + entry, value=entry) for entry in unread)]


_KEY = r"[A-Za-z_](?!.*\.\.)[\w./@-]*"
OVERRIDE = re.compile(rf"(\+\+|\+|~)?({_KEY.replace('.*', '[^=]*')}(?:\[[^=]*\])?)=(.*)", re.DOTALL)
_DELETED = re.compile(rf"~({_KEY})")
DELETION = "~"
"""Prefix of the key of a setting that deletes others."""
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_LEVELS = 20
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}


def read_override(word: str, source: str, line: int | None = None, unset: tuple[str, ...] = ()) -> Setting | None:
    """Return the setting of `key=value`, `+key=value`, `~key=value` or `~key`, or None for other words."""
    if (deleted := _DELETED.fullmatch(word)) is not None:
        return Setting(DELETION + deleted[1], None, source, line, unset)
    match = OVERRIDE.fullmatch(word)
    if match is None:
        return None
    sign, key, text = match.groups()
    if sign == DELETION:
        return Setting(DELETION + key, None, source, line, unset)
    return Setting(key, read_scalar(text), source, line, unset)


def without_deleted(settings: Iterable[Setting]) -> tuple[list[Setting], list[tuple[Setting, int]]]:
    """Return the settings that are not deleted later, and each deletion with the number of settings that it removed."""
    kept: list[Setting] = []
    deletions: list[tuple[Setting, int]] = []
    for setting in settings:
        if not setting.key.startswith(DELETION):
            kept.append(setting)
            continue
        name = setting.key.removeprefix(DELETION)
        left = [one for one in kept if one.key != name and not one.key.startswith((f"{name}.", f"{name}["))]
        deletions.append((setting, len(kept) - len(left)))
        kept = left
    return kept, deletions


def read_scalar(text: str) -> Any:
    """Parse a value like Hydra's command line: a number, a keyword, a list, a mapping, or otherwise the text."""
    bare = text.strip()
    if bare.lower() in _WORDS:
        return _WORDS[bare.lower()]
    if re.fullmatch(r"[-+]?\d+", bare):
        return int(bare)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", bare):
        return float(bare)
    if bare[:1] in "[{'\"" and bare:
        try:
            documents = parse_yaml(re.sub(r",(?=\S)", ", ", bare), "value")
            return documents[0].value if documents else None
        except ConfigError:
            return bare
    return text


def read_yaml(text: str, source: str) -> list[Setting]:
    """Return the settings of a YAML file by dotted key, with resolved interpolations. Items of lists of mappings have keys `key[0].name`.

    Raises:
        ConfigError: the text is not YAML, or not a mapping.
    """
    documents, problems = examine_yaml(text, source)
    if problems:
        raise ConfigError(problems)
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        raise refuse_file(source, f"the file contains {len(documents)} YAML documents, expected one mapping")
    lines = documents[0].lines
    flat = [
        (key, ".".join(_spell_key(key)).replace(".[", "["), value)
        for key, value in _leaf_settings(documents[0].value, ())
    ]
    return [Setting(name, value, source, lines.get(key)) for key, name, value in flat]


def _spell_key(key: tuple[str | int, ...]) -> Iterator[str]:
    for part in key:
        yield f"[{part}]" if isinstance(part, int) else part


def _leaf_settings(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaf_settings(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaf_settings(item, (*path, index))
    else:
        yield path, value


def resolve_references(settings: Iterable[Setting]) -> list[Setting]:
    """Resolve `${other.key}`, `${.sibling}` and `${oc.select:key,default}`; unresolved references are recorded as unset."""
    found = list(settings)
    values = {setting.key: setting.value for setting in found}
    return [_resolve_value(setting, values) for setting in found]


def _resolve_value(setting: Setting, values: Mapping[str, object]) -> Setting:
    value, unset = setting.value, list(setting.unset)
    for _ in range(_LEVELS):
        if not isinstance(value, str) or (match := _INTERPOLATION.search(value)) is None:
            break
        there, inner = _look_up(match[1].strip(), setting.key, values)
        if not there:
            unset.append(match[0])
            inner = ""
        value = inner if match[0] == value else value[: match.start()] + str(inner) + value[match.end() :]
    return Setting(setting.key, value, setting.source, setting.line, tuple(unset))


def _look_up(inside: str, key: str, values: Mapping[str, object]) -> tuple[bool, Any]:
    """Return whether an interpolation has a target, and the target's value."""
    name, default, has_default = inside, None, False
    resolver, colon, rest = inside.partition(":")
    if colon:
        if resolver not in ("oc.select", "oc.env"):
            return False, None
        name, comma, text = rest.partition(",")
        has_default, default = bool(comma), read_scalar(text.strip())
    if name.startswith("."):
        parents = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-parents], name.lstrip(".")])
    if name in values:
        return True, values[name]
    if any(other.startswith((f"{name}.", f"{name}[")) for other in values):
        return True, f"the block {name}"
    return has_default, default
