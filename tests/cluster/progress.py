"""Progress lines with seconds, and waits that have a limit and say what they waited for."""

import time
from collections.abc import Callable

from .errors import ClusterError

Say = Callable[[str], None]


class Progress:
    """Prints one line per finished item with the seconds since the start."""

    def __init__(self, say: Say = print) -> None:
        self._say = say
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._start

    def __call__(self, message: str) -> None:
        self._say(f"{self.seconds:6.1f} s  {message}")


def wait_until(
    done: Callable[[], bool],
    what: str,
    *,
    timeout: float,
    interval: float = 0.05,
    state: Callable[[], str] = lambda: "",
) -> None:
    """Call `done` until it is true.

    Args:
        what: what is waited for, as it reads after "timed out waiting for".
        timeout: limit in seconds.
        interval: pause between two looks, in seconds.
        state: describes the present state; its text ends the error message.

    Raises:
        ClusterError: after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            detail = state()
            raise ClusterError(
                f"timed out after {timeout:.0f} s waiting for {what}" + (f"\n{detail}" if detail else "")
            )
        time.sleep(interval)
