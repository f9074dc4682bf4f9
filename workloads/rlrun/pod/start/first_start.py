"""Mark by which a trainer's process is started once per pod.

Kubernetes always restarts the containers of a StatefulSet. But a group that lost a process cannot continue: the operator replaces all of
its pods, with a new attempt. Therefore the first start leaves a mark in the pod, and a container that finds it idles until the pod is
deleted.
"""

from __future__ import annotations

from pathlib import Path

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

MARK = "started"


def is_first_start(state: Path, attempt: int) -> bool:
    """Return whether this is the first start of a trainer's container in this pod, and leave the mark if so.

    Args:
        state: volume with the lifetime of the pod.
        attempt: number to write into the mark; informational.

    Raises:
        RoleError: the mark cannot be written, so that a second start could not be recognized.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        with (state / MARK).open("x") as file:
            file.write(f"{attempt}\n")
    except FileExistsError:
        return False
    except OSError as error:
        raise RoleError(
            f"RLRUN_POD_STATE: cannot write to {state}: {error.strerror}; mount an emptyDir there", exit_codes.FAILURE
        ) from error
    return True
