"""A trainer's process is started once per pod.

A StatefulSet's containers are always started again. But a group that lost one of its processes is over: the operator replaces all of its
pods, with a new attempt. So the first start leaves a mark in the pod, and a container that finds it holds still until the pod is deleted.
"""

from __future__ import annotations

from pathlib import Path

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

MARK = "started"


def is_first_start(state: Path, attempt: int) -> bool:
    """True if this is the first start of a trainer's container in this pod; leaves the mark if so.

    Args:
        state: a volume that lives as long as the pod.
        attempt: kept in the mark, for people.

    Raises:
        RoleError: the mark cannot be written: nothing is started that could not be distinguished from a second start.
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
