"""Folders that a pod's containers mount from the run's volume.

The kubelet would make a missing one as root, which not every volume lets write, and with the rights of the volume's own folder.
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
"""Time between two looks at a volume that refuses to write."""


def make_folders(paths: Sequence[Path], *, say: Callable[[str], None], signals: Signals) -> None:
    """Make the folders that the pod's containers mount, as their user; on a volume that is full or read-only wait until it is not.

    Raises:
        RoleError: one cannot be made.
        StoppedError: a signal came.
    """

    def make() -> None:
        for path in paths:
            try:
                make_folder(path)
            except OSError as error:
                trouble = trouble_of(error, path.parent)
                if trouble is None:
                    raise RoleError(
                        f"cannot make {path} as user {os.getuid()}: {error.strerror}", exit_codes.STORAGE
                    ) from error
                raise RefusedError(f"cannot make {path}: {trouble.text}; {trouble.remedy}", trouble) from error

    until_it_passes(make, say=say, signals=signals)


def until_it_passes(write: Callable[[], None], *, say: Callable[[str], None], signals: Signals) -> None:
    """Call `write` until the run's volume is not what refuses it.

    Raises:
        RoleError: it never will: of `write`.
        StoppedError: a signal came.
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
