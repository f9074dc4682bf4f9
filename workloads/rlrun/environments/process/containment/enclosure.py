"""Enclosure of an environment's process: Landlock rules, and a private folder.

A process with a Landlock domain can trace and inspect only processes of that domain and of nested ones: its own, but not those of other
environments, of the trainer or of the user. It cannot read files in the folders of credentials, and it can write only in its private
folder, in the hub's caches of data and in `/dev`. From Landlock 6 (Linux 6.12) it can send signals only to its own processes. Its children
inherit all rules.

The rules require `no_new_privs`, which a pod without privilege escalation has, and Landlock 2 (Linux 5.19), because version 1 would deny
every move between folders. Mounting is denied, too. Sources: landlock(7); https://docs.kernel.org/userspace-api/landlock.html.

The private folder contains the process's home, its temporary files and, in a pod, its working directory. An environment without its own
image runs as the orchestrator's user, next to processes with secrets. If it could write their home folder, their working directory or the
run's folder, it could add modules that they import (`trio.py`), settings that send a key to another server (`.netrc`, settings of a
tracker), or another configuration. Therefore it can write only in its private folder and in the hub's caches of data, and no other process
reads the private folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.environments.rewards.sandbox import (
    CHANGE_FOLDERS,
    READ_FILE,
    REFER,
    SCOPE_SIGNAL,
    TRUNCATE,
    WRITE_FILE,
    UnavailableError,
    landlock_version,
    restrict_files,
)

CREDENTIALS = ("/var/run/secrets/rlrun", "/var/run/secrets/kubernetes.io")
"""Folders of the orchestrator's pod with tokens of the Kubernetes API."""
_PR_GET_NO_NEW_PRIVS = 39
_WITH_MOVES = 2
"""First Landlock version that can allow moves between folders."""
_WITH_TRUNCATE, _WITH_SCOPES = 3, 6
"""First Landlock versions that can deny emptying a file, and sending a signal out of the domain."""
_WRITABLE = ("/dev", "/proc")
"""Folders that programs write in addition to their own: terminals, `/dev/null`, shared memory, and files of their own processes, which
debuggers write."""


def explain_missing() -> str | None:
    """Return why this kernel cannot enclose a process without privileges; None if it can, or if this process has privileges."""
    if not _gave_up_privileges():
        return None
    try:
        version = landlock_version(ctypes.CDLL(None, use_errno=True))
    except UnavailableError as error:
        return str(error)
    return None if version >= _WITH_MOVES else f"Landlock {version} of this kernel is too old (Linux 5.19 or newer)"


def is_available() -> bool:
    """Return whether `enclose_process` has an effect: this process gave up privileges, and the kernel is new enough."""
    return _gave_up_privileges() and explain_missing() is None


def enclose_process(closed: Sequence[str] = CREDENTIALS, writable: Sequence[str] | None = None) -> bool:
    """Enclose this process and its future children if `is_available`; return whether it is enclosed.

    Args:
        closed: folders whose files cannot be read.
        writable: only folders, in addition to `/dev`, in which files can be created, changed and removed. Default: all.
    """
    if not is_available():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = landlock_version(libc)
    handled = READ_FILE | REFER
    rules = [("/", REFER), *((path, READ_FILE) for path in _all_but([Path(path) for path in closed]))]
    if writable is not None:
        changes = WRITE_FILE | CHANGE_FOLDERS | (TRUNCATE if version >= _WITH_TRUNCATE else 0)
        handled |= changes
        rules += [(path, changes) for path in (*_WRITABLE, *writable)]
    try:
        restrict_files(libc, handled, rules, scoped=SCOPE_SIGNAL if version >= _WITH_SCOPES else 0)
    except UnavailableError:  # at most 16 domains can be nested
        return False
    return True


def _gave_up_privileges() -> bool:
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))


def _all_but(closed: Sequence[Path]) -> list[str]:
    """Return files and folders that together contain everything except the closed folders.

    Landlock rules can only allow access. Therefore all entries next to a closed folder and next to its parents are listed. Entries that
    are created there later are closed.
    """
    shut = {path.resolve() for path in closed if path.is_dir()}
    if not shut:
        return ["/"]
    above = {parent for path in shut for parent in path.parents}
    found: list[str] = []
    for folder in above:
        with suppress(OSError):
            real = (
                entry for entry in os.scandir(folder) if not entry.is_symlink()
            )  # links are left out, because one may point into a closed folder
            found += [entry.path for entry in real if Path(entry.path) not in shut | above]
    return found


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
