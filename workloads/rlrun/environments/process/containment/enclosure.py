"""Landlock rules for an environment's process: no access to other processes and to credentials, and write access only to its files.

A process with a Landlock domain can trace and inspect only processes of that domain and of nested ones: its own, but not those of other
environments, of the trainer or of the user. It cannot read files in the folders of credentials, and it can write only in its private
folder, in the hub's caches and in `/dev`. From Landlock 6 (Linux 6.12) it can send signals only to its own processes. Its children inherit
all rules.

The rules require `no_new_privs`, which a pod without privilege escalation has, and Landlock 2 (Linux 5.19), because version 1 would deny
every move between folders. Mounting is denied, too.
Sources: landlock(7); https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
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
