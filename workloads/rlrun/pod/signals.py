"""SIGTERM and SIGINT of the container's first process: forwarded to the role, or the end of a wait.

The kernel has no default action for signals to the first process of a container, so both are always handled.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

from rlrun.runtime.ending import Ending

HANDLED = (signal.SIGTERM, signal.SIGINT)
SIGNALLED = 128
"""Exit code 128 + n means: ended by signal n."""


class StoppedError(Exception):
    """A signal arrived while this process was waiting."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """Exit code: 128 + number of the signal."""
        return SIGNALLED + self.number


class Signals:
    """Signal handlers of this process; must be created in the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        """First received signal."""
        self._ending = Ending()
        self._child: int | None = None
        for number in HANDLED:
            signal.signal(number, self._handle)
        # The container's command has blocked these signals so far: a pending one is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        self._ending.set()
        if self._child is not None:
            self._send(number)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child or 0, number)

    def forward_to(self, child: int | None) -> None:
        """Forward every signal to this process, including one that has already arrived; None: stop forwarding."""
        self._child = child
        if child is not None and self.received is not None:
            self._send(self.received)

    def fileno(self) -> int:
        """Descriptor for `select`, readable from the first signal on; its bytes are never consumed."""
        return self._ending.fileno()

    def sleep(self, seconds: float | None) -> None:
        """Wait.

        Args:
            seconds: duration; None: until a signal arrives.

        Raises:
            StoppedError: a signal arrived, now or before.
        """
        self._ending.wait(seconds)
        if self.received is not None:
            raise StoppedError(self.received)
