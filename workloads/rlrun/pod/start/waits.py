"""Waiting for what another pod does, with a deadline and a word every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlrun.pod.signals import Signals
from rlrun.protocol.files.failures import RoleError

DEADLINE_SECONDS = 1800.0
"""Images are pulled and machines are made meanwhile."""
REPORT_SECONDS = 30.0
POLL_SECONDS = 0.5


def wait_until(
    look: Callable[[], str | None],
    *,
    what: str,
    say: Callable[[str], None],
    signals: Signals,
    deadline_seconds: float = DEADLINE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Return as soon as `look()` is None.

    Args:
        look: why it is not so far yet; None: it is.
        what: what is waited for, as the end of `waiting for ...`.
        say: called at once, and every half minute.
        signals: end the wait.
        deadline_seconds: longest wait.
        poll_seconds: pause between two looks.

    Raises:
        RoleError: it took too long; says what was missing.
        StoppedError: a signal came.
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
