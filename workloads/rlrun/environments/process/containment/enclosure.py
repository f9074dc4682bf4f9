"""Landlock for an environment's process: no look into other processes, no credentials of the pod, no files but its own to write.

A process with a Landlock domain can trace, and look into, only processes of that domain and those nested in it: its own, not those of other
environments, of the trainer or of the user. It can read no file in the folders of credentials, and it writes only in its private folder, in
the hub's caches and in `/dev`. From version 6 (Linux 6.12) it sends signals only to its own processes. What it starts inherits all of this.
Put on where the process has `no_new_privs`, as in a pod without privilege escalation, for it cannot be put on otherwise; from version 2
(Linux 5.19), since version 1 would refuse every move between folders. Mounting is refused, too.
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
"""Folders of the orchestrator's pod with tokens of Kubernetes' API."""
_PR_GET_NO_NEW_PRIVS = 39
_WITH_MOVES = 2
"""First version that can allow moves between folders."""
_WITH_TRUNCATE, _WITH_SCOPES = 3, 6
"""First versions that can refuse to empty a file, and to send a signal out of the domain."""
_WRITABLE = ("/dev", "/proc")
"""Folders that programs write next to their own: terminals, `/dev/null`, shared memory, and files of their own processes, which
debuggers write."""


def explain_missing() -> str | None:
    """Reason why this kernel cannot enclose a process that gave up privileges; None: it can, or the process did not give them up."""
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
    """Enclose this process and all that it starts, if `is_available`; return whether it is enclosed.

    Args:
        closed: folders whose files are not read.
        writable: the only folders, next to `/dev`, in which files are made, changed and removed; default: all.
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
    except UnavailableError:  # no more than 16 domains can be nested
        return False
    return True


def _gave_up_privileges() -> bool:
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0))


def _all_but(closed: Sequence[Path]) -> list[str]:
    """Files and folders that hold everything but some folders.

    Landlock allows, and takes nothing away from what it allows: so of each folder above a closed one all other entries are listed, and what
    is made there later is closed.
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
            )  # a link may lead into a closed one
            found += [entry.path for entry in real if Path(entry.path) not in shut | above]
    return found
