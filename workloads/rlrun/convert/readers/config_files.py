"""Files that `--config-path` and `--config-name` of Hydra name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from rlrun.convert.readers.setting import Setting

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
