"""SIGTERM and SIGINT of the container's first process: passed on to the role, or the end of what this process waits for.

The kernel gives the first process of a container no default for signals, so both are always handled.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

from rlrun.runtime.ending import Ending

HANDLED = (signal.SIGTERM, signal.SIGINT)
SIGNALLED = 128
"""Exit code 128 + n: ended by signal n."""


class StoppedError(Exception):
    """A signal came while this process waited for something."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + the signal's number."""
        return SIGNALLED + self.number


class Signals:
    """Installs the handlers; in the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal."""
        self._ending = Ending()
        self._child: int | None = None
        for number in HANDLED:
            signal.signal(number, self._handle)
        # The container's command has blocked them until now: one that has come meanwhile comes here.
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
        """Pass every signal on to this process, the one that has come already included; None: no longer."""
        self._child = child
        if child is not None and self.received is not None:
            self._send(self.received)

    def fileno(self) -> int:
        """Descriptor for `select`: readable for ever, from the first signal on; its bytes are never consumed."""
        return self._ending.fileno()

    def sleep(self, seconds: float | None) -> None:
        """Wait.

        Args:
            seconds: how long; None: until a signal comes.

        Raises:
            StoppedError: a signal came, now or before.
        """
        self._ending.wait(seconds)
        if self.received is not None:
            raise StoppedError(self.received)
