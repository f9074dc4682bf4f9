"""Files that `--config-path` and `--config-name` of Hydra name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from rlrun.convert.readers.setting import Setting

LISTED = "defaults."
"""Beginning of the key of a setting that stands for a file of a list of defaults that is not read."""
NAME_OPTIONS = ("--config-name", "-cn")
PATH_OPTIONS = ("--config-path", "-cp", "--config-dir", "-cd")
_PROGRAMS_OWN = ("", "config", "./config", "verl/trainer/config")
"""Values of `--config-path` that mean the folder of the program's own configurations."""
_PARENTS = 5
"""Folders above a script in which a relative path may start: scripts of a repository are run from its root."""


def named_configuration(settings: Sequence[Setting]) -> tuple[str, str] | None:
    """Return folder and name of the configuration that settings of a script name, or None."""
    values = {one.key: str(one.value) for one in settings if one.value is not None}
    name = next((values[key] for key in NAME_OPTIONS if key in values), None)
    folder = next((values[key] for key in PATH_OPTIONS if key in values), "")
    return None if name is None else (folder.rstrip("/"), PurePath(name).name.removesuffix(".yaml"))


def is_programs_own(folder: str) -> bool:
    """Return true if a folder of `--config-path` is that of the program's own configurations."""
    return folder in _PROGRAMS_OWN or folder.endswith("verl/trainer/config")


def possible_files(folder: str, name: str, script: Path) -> Iterator[Path]:
    """Yield the places of a configuration, the likeliest first.

    Args:
        folder: value of `--config-path`; variables of a script without a value are left out of it.
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
    """Return true if a key is that of a list of defaults, or of a text in one."""
    return key == "defaults" or key.startswith(LISTED) or re.fullmatch(r"defaults\[\d+\]", key) is not None


def listed_files(settings: Sequence[Setting]) -> list[str]:
    """Return the texts of a file's lists of defaults, in their order; `_self_` stands for the file itself."""
    found: list[str] = []
    for one in settings:
        if is_listed(one.key):
            found += [str(item) for item in (one.value if isinstance(one.value, list) else [one.value])]
    return found


def default_file(entry: str, folder: Path) -> Path | None:
    """Return the place of a file in a list of defaults whose keys stand at the root, or None if they do not.

    Args:
        entry: text of the list, such as `../math/base@_global_`.
        folder: folder of the file that has the list.
    """
    name, _, package = entry.partition("@")
    return (folder / name).with_suffix(".yaml") if package in ("", "_global_") else None


def without_lists(settings: Sequence[Setting], unread: Sequence[str]) -> list[Setting]:
    """Return settings without their lists of defaults, and one setting for each file of them that is not read."""
    lists = [one for one in settings if is_listed(one.key)]
    kept = [one for one in settings if not is_listed(one.key)]
    return [*kept, *(replace(lists[0], key=LISTED + entry, value=entry) for entry in unread)]
