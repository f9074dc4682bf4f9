"""Wait for the configuration file that this pod was made for.

One ConfigMap holds the file of the present attempt. A kubelet may mount it as it was a moment ago, where another pod of the run is on the
node already, and brings a mounted file up to date within a minute or two; and a user may edit it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from rlrun.config.models.file_mark import file_mark
from rlrun.pod.settings import PodSettings
from rlrun.pod.signals import Signals
from rlrun.pod.start.waits import wait_until

DEADLINE_SECONDS = 300.0
"""A kubelet looks after mounted files every 60 to 90 s, and its cache may be another minute old."""


def wait_for_own_file(
    pod: PodSettings,
    role: str,
    *,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> None:
    """Return once the file is the one that the pod's template names, or at once where it names none, as those of earlier releases.

    Args:
        pod: names it.
        role: command of the container: `model` reads what the others of its pod do.
        say: called with what is waited for.
        signals: end the wait.
        deadline_seconds: longest wait.

    Raises:
        RoleError: it is still another one; a restart may help.
        StoppedError: a signal came.
    """
    if pod.config_mark is not None:
        wait_until(
            lambda: _problem(pod, role),
            what="the configuration that this pod was made for",
            say=say,
            signals=signals,
            deadline_seconds=deadline_seconds,
        )


def _problem(pod: PodSettings, role: str) -> str | None:
    try:
        found = file_mark(json.loads(pod.config.read_bytes()), role)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{pod.config} cannot be read: {error}"
    if found == pod.config_mark:
        return None
    return (
        f"{pod.config} is of another attempt, or was edited (mark {found}, not {pod.config_mark}); it comes from the run's ConfigMap, "
        "which the operator renders: leave that to it, and edit the RLRun"
    )
