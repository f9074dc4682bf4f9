"""Waiting for another pod, with a deadline and a log line every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlrun.pod.signals import Signals
from rlrun.protocol.files.failures import RoleError

WAIT_SECONDS = 1800.0
"""Maximum wait: images may have to be pulled and machines created."""
REPORT_SECONDS = 30.0
POLL_SECONDS = 0.5


def wait_until(
    look: Callable[[], str | None],
    *,
    what: str,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = WAIT_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Return as soon as `look()` returns None.

    Args:
        look: function that returns why the wait is not over, or None.
        what: subject of the wait, as the end of `waiting for ...`.
        say: callback for log lines: at once, and every half minute.
        signals: signals that end the wait.
        deadline_seconds: maximum wait.
        poll_seconds: pause between two calls of `look`.

    Raises:
        RoleError: the wait took too long; the message has the last reason.
        StoppedError: a signal arrived.
    """
    began = time.monotonic()
    reported = -REPORT_SECONDS
    while (reason := look()) is not None:
        elapsed = time.monotonic() - began
        if elapsed > deadline_seconds:
            raise RoleError(f"waited {deadline_seconds:g} s for {what}: {reason}")
        if elapsed - reported >= REPORT_SECONDS:
            say(f"waiting for {what} since {elapsed:.0f} s: {reason}")
            reported = elapsed
        signals.sleep(poll_seconds)
