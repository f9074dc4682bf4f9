"""Files that Hydra's `--config-path` and `--config-name` refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from rlrun.convert.readers.setting import Setting

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
