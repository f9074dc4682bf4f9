"""Folders that a pod's containers mount from the run's volume.

The kubelet would create missing ones as root, which some volumes refuse, and with the permissions of the volume's root folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.pod.signals import Signals
from rlrun.pod.start.waits import wait_until
from rlrun.protocol.files.durable import make_folder
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.volume_faults import RefusedError, may_pass, trouble_of
from rlrun.runtime import exit_codes

VOLUME_POLL_SECONDS = 5.0
"""Seconds between two checks of a volume that refuses writes."""


def make_folders(paths: Sequence[Path], *, say: Callable[[str], None], signals: Signals) -> None:
    """Create the folders that the pod's containers mount, as their user; wait while the volume is full or read-only.

    Raises:
        RoleError: a folder cannot be created.
        StoppedError: a signal arrived.
    """

    def make() -> None:
        for path in paths:
            try:
                make_folder(path)
            except OSError as error:
                trouble = trouble_of(error, path.parent)
                if trouble is None:
                    raise RoleError(
                        f"cannot create {path} as user {os.getuid()}: {error.strerror}", exit_codes.STORAGE
                    ) from error
                raise RefusedError(f"cannot create {path}: {trouble.text}; {trouble.remedy}", trouble) from error

    until_it_passes(make, say=say, signals=signals)


def until_it_passes(write: Callable[[], None], *, say: Callable[[str], None], signals: Signals) -> None:
    """Call `write` until the run's volume no longer refuses it.

    Raises:
        RoleError: `write` failed for another reason.
        StoppedError: a signal arrived.
    """

    def problem() -> str | None:
        try:
            write()
        except RoleError as error:
            if not may_pass(error):
                raise
            return str(error)
        return None

    wait_until(
        problem,
        what="the run's volume",
        say=say,
        signals=signals,
        deadline_seconds=math.inf,
        poll_seconds=VOLUME_POLL_SECONDS,
    )
