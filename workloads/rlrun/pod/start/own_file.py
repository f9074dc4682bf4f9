"""Wait for the configuration file that belongs to this pod.

One ConfigMap holds the file of the current attempt. If another pod of the run is already on the node, a kubelet may mount an outdated
version, which it updates within a minute or two; and a user may edit the ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from rlrun.config.models.file_mark import file_mark
from rlrun.pod.settings import PodSettings
from rlrun.pod.signals import Signals
from rlrun.pod.start.waits import wait_until

CONFIG_FILE_SECONDS = 300.0
"""Maximum wait: a kubelet updates mounted files every 60 to 90 s, and its cache may be another minute old."""


def wait_for_own_file(
    pod: PodSettings,
    role: str,
    *,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = CONFIG_FILE_SECONDS,
) -> None:
    """Return once the file is the one that the pod's template names; at once for pods of earlier releases, which name none.

    Args:
        pod: settings with the name of the file and its mark.
        role: command of the container; `model` reads the part of its pod's role.
        say: callback that logs the wait.
        signals: signals that end the wait.
        deadline_seconds: maximum wait.

    Raises:
        RoleError: it is still another file; a restart may help.
        StoppedError: a signal arrived.
    """
    if pod.config_mark is not None:
        wait_until(
            lambda: _problem(pod, role),
            what="the configuration of this pod",
            say=say,
            signals=signals,
            deadline_seconds=deadline_seconds,
        )


def _problem(pod: PodSettings, role: str) -> str | None:
    try:
        found = file_mark(json.loads(pod.config.read_bytes()), role)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"cannot read {pod.config}: {error}"
    if found == pod.config_mark:
        return None
    return (
        f"{pod.config} belongs to another attempt, or was edited (mark {found}, not {pod.config_mark}); the operator renders it into the "
        "run's ConfigMap: edit the RLRun instead"
    )
