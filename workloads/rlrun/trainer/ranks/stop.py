"""SIGTERM and SIGINT of one rank: at first a request to stop at a place that all ranks agree on, then the end at once.

A collective whose peers are gone blocks in C++, where no Python handler runs; so a thread waits for the signals. Every artifact of the file
protocol is whole or ignored: a rank may end anywhere, and what a request to stop adds is the checkpoint of the last finished step.
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
"""Wakes the thread that waits for signals, where one was not sent to this rank."""
_LOOK_SECONDS = 0.2
_SIGNALLED = 128


class StopAgreed(Exception):  # noqa: N818  an end, not an error
    """All ranks leave the loop here: one of them was asked to stop."""


class Stop:
    """Requests to stop, from signals to this rank, its peers and the orchestrator.

    Until `allow_time` is called, nothing could be saved: the first signal ends the process. From then on the first signal is a request; a
    second one, the deadline after the first, or the loss of a peer on this machine end the process.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal of this rank, or of one that it agreed with."""
        self._asked = threading.Event()
        self._seconds = 0.0
        self._peers: Sequence[int] = ()
        self._end: Callable[[int], None] = os._exit

    @property
    def asked(self) -> bool:
        """True if this rank, or one of those that it agreed with, was asked to stop."""
        return self._asked.is_set()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; where the orchestrator asked, the usual one: the signal was not this role's."""
        return exit_codes.FAILURE if self.number is None else _SIGNALLED + self.number

    @property
    def why(self) -> str:
        """Origin of the request, for a person."""
        return "the orchestrator, which was told to stop" if self.number is None else signal.Signals(self.number).name

    def listen(self) -> None:
        """Take the signals from now on; in the main thread, before others start."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, _REQUEST})
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def allow_time(self, seconds: float, peers: Sequence[int] = ()) -> None:
        """From now on there is something to save.

        Args:
            seconds: between the first signal and the end at the latest.
            peers: pids of the other ranks on this machine. When one of them is gone, the collectives that a save needs cannot end.
        """
        self._peers = tuple(peers)
        self._seconds = seconds

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` in a thread of its own once this rank is asked to stop."""

        def wait() -> None:
            self._asked.wait()
            act()

        threading.Thread(target=wait, name="stop", daemon=True).start()

    def join(self, number: int | None = None) -> None:
        """Stop as after a first signal; one that is sent here later is not the second.

        Args:
            number: the signal that another rank was sent; None: the orchestrator asks.
        """
        if not self.asked:
            self.number = number
            os.kill(os.getpid(), _REQUEST)
            self._asked.wait()

    def _wait(self) -> None:
        first = signal.sigwait({*_SIGNALS, _REQUEST})
        if first != _REQUEST:
            self.number = first
        name = self.why
        if not self._seconds:
            self._leave(f"ended by {name}")
        self._asked.set()
        deadline, sent = time.monotonic() + self._seconds, first != _REQUEST
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(
                min(left, _LOOK_SECONDS)
            )  # sigtimedwait of CPython 3.11 returns rubbish when a frozen process goes on too late
            if (again := signal.sigpending() & _SIGNALS) and not sent:
                self.number, sent = signal.sigwait(again), True
            elif again:
                self._leave(f"ended by a second signal, {signal.Signals(min(again)).name}")
            if any(not _is_alive(pid) for pid in self._peers):
                self._leave(f"ended after {name}: another rank is gone already")
        self._leave(f"ended {self._seconds:g} s after {name} (checkpoint.gracePeriodSeconds), before all was saved")

    def _leave(self, reason: str) -> None:
        sys.stderr.flush()
        os.write(2, f"trainer: {reason}\n".encode())
        self._end(self.exit_code)


def _is_alive(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything: the state follows the last one.
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
