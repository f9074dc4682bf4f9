"""Private folder of an environment's process: its home, its temporary files and, in a pod, its working directory.

An environment without its own image runs as the orchestrator's user, next to processes with secrets. If it could write their home folder,
their working directory or the run's folder, it could add modules that they import (`trio.py`), settings that send a key to another server
(`.netrc`, settings of a tracker), or another configuration. Therefore it can write only here and in the hub's caches of data, and no
other process reads this folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlrun.environments.process.containment.enclosure import CREDENTIALS

HOME, TEMPORARY, WORK = "home", "tmp", "work"
_XDG = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
_HUB_CACHES = {
    "hub": ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
    "datasets": ("HF_DATASETS_CACHE",),
    "assets": ("HF_ASSETS_CACHE",),
    "xet": ("HF_XET_CACHE",),
}
"""Data folders of `HF_HOME`, and the variables that replace each. They exclude `modules` (code) and `token` (a secret)."""
_REFUSED = re.compile(
    r"Permission denied: (?P<quote>['\"])(?P<behind>.+?)(?P=quote)|(?P<before>/[^\s:'\"‘’]+)['\"’]?: Permission denied"
)
"""Path in error messages of Python and of other programs."""


def make_private_folder() -> Path:
    """Create an empty private folder.

    Raises:
        OSError: the folder for temporary files cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlrun-environment-"))
    for name in (HOME, TEMPORARY, WORK):
        (folder / name).mkdir()
    return folder


def remove_private_folder(folder: Path) -> None:
    """Remove a private folder with everything in it."""
    shutil.rmtree(folder, ignore_errors=True)


def use_private_folder(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment variables with home and temporary files in a private folder."""
    kept = {name: value for name, value in variables.items() if name not in _XDG}
    temporary = str(folder / TEMPORARY)
    return {**kept, "HOME": str(folder / HOME), "TMPDIR": temporary, "TMP": temporary, "TEMP": temporary}


def working_directory(folder: Path) -> Path | None:
    """Return the working directory of the process: `work` of its private folder, or None for the current one.

    Images of a run start in `/`, where relative paths of the manifest are meaningless. In other directories relative paths are valid, so
    the process stays there.
    """
    return folder / WORK if Path.cwd() == Path("/") else None


def make_hub_caches(variables: Mapping[str, str]) -> list[Path]:
    """Create the hub's data folders, which environments share, and return them.

    Args:
        variables: environment variables of the process. Without `HF_HOME` and similar ones the caches are in its private home.
    """
    home = variables.get("HF_HOME")
    named = [_first_set(variables, names) for names in (*_HUB_CACHES.values(), ("TORCH_HOME",), ("NLTK_DATA",))]
    places = [place for place in named if place]
    if home:
        places += [f"{home}/{name}" for name, names in _HUB_CACHES.items() if not _first_set(variables, names)]
    found = []
    for place in map(Path, places):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:  # a read-only volume
            continue
        found.append(place)
    return found


def refused_hint(message: str, closed: Sequence[str] = CREDENTIALS) -> str:
    """Return advice on an error of an enclosed environment that contains a path and "Permission denied", or "".

    The error does not contain the kind of access. This process has the environment's user but is not enclosed. If it cannot read the
    path either, the path's owner and mode are the reason. Otherwise the environment tried to write (or to read credentials).

    Args:
        message: message of the error.
        closed: folders whose files an enclosed environment cannot read.
    """
    found = _REFUSED.search(message)
    if found is None:
        return ""
    path = Path(found["behind"] or found["before"])
    if any(path.resolve().is_relative_to(Path(one).resolve()) for one in closed):
        return f" (an environment without its own image cannot read the pod's credentials in {path.parent})"
    if (unreadable := _unreadable_part(path)) is not None:
        return (
            f" (owner and mode of {unreadable} deny access to user {os.getuid()}: make it readable, for example with "
            f"`chmod -R a+rX {unreadable}`)"
        )
    return (
        " (an environment without its own image can write only in its home folder and TMPDIR: use Python's tempfile, "
        "or give the environment a container with environments[].image)"
    )


def _unreadable_part(path: Path) -> Path | None:
    """Return the first part of a path that this process cannot read (a file) or enter (a folder), or None."""
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK):
            return folder if folder.exists() else None
    return path if os.path.lexists(path) and not os.access(path, os.R_OK) else None


def _first_set(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((variables[name] for name in names if variables.get(name)), None)
