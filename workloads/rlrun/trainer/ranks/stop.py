"""SIGTERM and SIGINT of one rank: the first signal requests a stop that all ranks agree on, the second ends the process.

A collective with ended peers blocks in C++, where Python does not run signal handlers; therefore a thread waits for the signals. All
artifacts of the file protocol are either complete or ignored, so a rank may end at any point. A request to stop only adds the checkpoint
of the last finished step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.runtime import exit_codes

_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_REQUEST = signal.SIGUSR1
"""Signal that wakes the waiting thread if the request did not come as a signal to this rank."""
_LOOK_SECONDS = 0.2
_SIGNALLED = 128


class StopAgreed(Exception):  # noqa: N818  an end, not an error
    """Raised on all ranks to leave the loop after a request to stop."""


class Stop:
    """Stop requests from signals to this rank, from its peers and from the orchestrator.

    Before `allow_time` there is nothing to save, so the first signal ends the process. Afterwards the first signal is a request; a second
    signal, the deadline after the first, or the end of a peer on this machine ends the process.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """First signal of this rank or of a peer; None without a signal."""
        self._asked = threading.Event()
        self._seconds = 0.0
        self._peers: Sequence[int] = ()
        self._end: Callable[[int], None] = os._exit

    @property
    def is_requested(self) -> bool:
        """Whether this rank or a peer has a request to stop."""
        return self._asked.is_set()

    @property
    def exit_code(self) -> int:
        """128 + number of the signal; the exit code of a failure if the orchestrator requested the stop."""
        return exit_codes.FAILURE if self.number is None else _SIGNALLED + self.number

    @property
    def origin(self) -> str:
        """Origin of the request, for messages."""
        return "the orchestrator, which has to stop" if self.number is None else signal.Signals(self.number).name

    def start_listening(self) -> None:
        """Start to receive the signals; called in the main thread before other threads start."""
        # Blocked in all threads and received by one: a Python handler runs only in the main thread,
        # which may be inside a collective for minutes.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, _REQUEST})
        threading.Thread(target=self._handle_signals, name="signals", daemon=True).start()

    def allow_time(self, seconds: float, peers: Sequence[int] = ()) -> None:
        """Allow time to save after the first signal.

        Args:
            seconds: longest time from the first signal to the end of the process.
            peers: process ids of the other ranks on this machine. If one of them ends, the collectives of a save cannot finish.
        """
        self._peers = tuple(peers)
        self._seconds = seconds

    def call_after_request(self, act: Callable[[], None]) -> None:
        """Call `act` in a separate thread after a request to stop."""

        def wait() -> None:
            self._asked.wait()
            act()

        threading.Thread(target=wait, name="stop", daemon=True).start()

    def request_stop(self, number: int | None = None) -> None:
        """Request a stop without a signal to this rank; a later signal to this rank does not count as the second.

        Args:
            number: signal of another rank, or None for a request of the orchestrator.
        """
        if not self.is_requested:
            self.number = number
            os.kill(os.getpid(), _REQUEST)
            self._asked.wait()

    def _handle_signals(self) -> None:
        # The first signal, or a request of the orchestrator or a peer.
        first = signal.sigwait({*_SIGNALS, _REQUEST})
        if first != _REQUEST:
            self.number = first
        name = self.origin
        if not self._seconds:
            self._end_process(f"ended by {name}")
        self._asked.set()
        # The loop has time to save. A request may be followed by its signal, which does not count as a second one.
        deadline, sent = time.monotonic() + self._seconds, first != _REQUEST
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(
                min(left, _LOOK_SECONDS)
            )  # sigtimedwait of CPython 3.11 returns a wrong value if a frozen process continues after the timeout
            if (again := signal.sigpending() & _SIGNALS) and not sent:
                self.number, sent = signal.sigwait(again), True
            elif again:
                self._end_process(f"ended by a second signal, {signal.Signals(min(again)).name}")
            if any(not _is_alive(pid) for pid in self._peers):
                self._end_process(f"ended after {name}: another rank has already ended")
        self._end_process(
            f"ended {self._seconds:g} s after {name} (checkpoint.gracePeriodSeconds), before the checkpoint was saved"
        )

    def _end_process(self, reason: str) -> None:
        sys.stderr.flush()
        os.write(2, f"trainer: {reason}\n".encode())
        # `os._exit`: a normal exit would wait for threads and process groups, which hang if another
        # rank has ended.
        self._end(self.exit_code)


def _is_alive(pid: int) -> bool:
    try:
        # The process name in parentheses may contain any characters; the state follows the last parenthesis.
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
