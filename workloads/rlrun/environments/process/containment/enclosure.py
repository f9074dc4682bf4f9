"""Landlock for an environment's process: no look into other processes, and no credentials of the pod.

A process with a Landlock domain can trace, and look into, only processes of that domain and those nested in it: its own, not those of other
environments, of the trainer or of the user. It can read no file in the folders of credentials; all other files are as before. What it
starts inherits both. Put on where the process has `no_new_privs`, as in a pod without privilege escalation, for it cannot be put on
otherwise; from version 2 (Linux 5.19), since version 1 would refuse every move between folders. Mounting is refused, too.
Sources: landlock(7); https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.environments.rewards.sandbox import READ_FILE, REFER, UnavailableError, landlock_version, restrict_files

CREDENTIALS = ("/var/run/secrets/rlrun", "/var/run/secrets/kubernetes.io")
"""Folders of the orchestrator's pod with tokens of Kubernetes' API."""
_PR_GET_NO_NEW_PRIVS = 39
_WITH_MOVES = 2
"""First version that can allow moves between folders."""


def missing() -> str | None:
    """Reason why this kernel cannot enclose a process that gave up privileges; None: it can, or the process did not give them up."""
    if not _gave_up_privileges():
        return None
    try:
        version = landlock_version(ctypes.CDLL(None, use_errno=True))
    except UnavailableError as error:
        return str(error)
    return None if version >= _WITH_MOVES else f"Landlock {version} of this kernel is too old (Linux 5.19 or newer)"


def enclose(closed: Sequence[str] = CREDENTIALS) -> bool:
    """Enclose this process and all that it starts, where the machine can; whether it can.

    Args:
        closed: folders whose files are not read.
    """
    if missing() is not None or not _gave_up_privileges():
        return False
    rules = [("/", REFER), *((path, READ_FILE) for path in _all_but([Path(path) for path in closed]))]
    try:
        restrict_files(ctypes.CDLL(None, use_errno=True), READ_FILE | REFER, rules)
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
