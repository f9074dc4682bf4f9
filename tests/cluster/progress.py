"""Progress lines with seconds, lines about long steps, and waits with a limit and a description."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from .errors import ClusterError

Say = Callable[[str], None]
LOG_SECONDS = 30.0
"""Pause between two lines about a running step in a log."""
SCREEN_SECONDS = 1.0
"""Pause between two updates of the last line of a terminal."""


def print_line(text: str) -> None:
    """Print a line and flush it: a log of CI is read while the command runs."""
    print(text, flush=True)


def terminal() -> TextIO | None:
    """Standard output if it is a terminal."""
    return sys.stdout if sys.stdout.isatty() else None


@dataclass
class Step:
    """A step that takes long.

    Attributes:
        name: name of the result, such as "kube 1.34.3".
        state: function that describes the part done; called for each line.
        began: start time in seconds.
        reported: time of the last line about it, in seconds.
    """

    name: str
    state: Callable[[], str]
    began: float
    reported: float

    def line(self, now: float) -> str:
        """Return name, part done and elapsed time."""
        return f"{self.name}: {', '.join(part for part in (self.state(), duration(now - self.began)) if part)}"


def duration(seconds: float) -> str:
    """Return a time as text: "42 s", "3 min 5 s"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Progress:
    """Printer of one line per finished item with the seconds since the start, and of lines about running steps.

    Threads may share one object. A running step has a line every `LOG_SECONDS`, or the last line of a terminal.

    Args:
        say: function that prints a permanent line.
        screen: terminal whose last line is rewritten, or None for a log.
        clock: time in seconds.
    """

    def __init__(
        self, say: Say = print_line, *, screen: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._screen, self._clock = say, screen, clock
        self._start = clock()
        self._steps: list[Step] = []
        self._lock = threading.Lock()
        self._all_done = threading.Event()

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._start

    def __call__(self, message: str) -> None:
        with self._lock:
            self._print(message)

    @contextmanager
    def step(self, name: str, state: Callable[[], str] = lambda: "") -> Iterator[Step]:
        """Report work while it runs.

        Args:
            name: name of the result, which reads well before a colon.
            state: function that describes the part done; it is called in another thread and must not raise.
        """
        now = self._clock()
        step = Step(name, state, now, now)
        with self._lock:
            self._steps.append(step)
            if len(self._steps) == 1:
                self._all_done = threading.Event()
                threading.Thread(target=self._report_until, args=(self._all_done,), daemon=True).start()
        try:
            yield step
        finally:
            with self._lock:
                self._steps.remove(step)
                self._clear()
                if not self._steps:
                    self._all_done.set()

    def report(self) -> None:
        """Print the lines that are due."""
        with self._lock:
            now = self._clock()
            if self._screen is not None:
                self._rewrite([step.line(now) for step in self._steps])
                return
            for step in self._steps:
                if now - step.reported >= LOG_SECONDS:
                    step.reported = now
                    self._print(step.line(now))

    def _report_until(self, all_done: threading.Event) -> None:
        while not all_done.wait(SCREEN_SECONDS):
            try:
                self.report()
            except (OSError, ValueError):  # the reader has closed the pipe; the command itself ends with the same error
                return

    def _print(self, message: str) -> None:
        self._clear()
        self._say(f"{self.seconds:6.1f} s  {message}")

    def _rewrite(self, lines: Sequence[str]) -> None:
        if self._screen is not None and lines:
            width = shutil.get_terminal_size().columns - 1  # a line that fills the last column may wrap
            self._screen.write("\r\x1b[K" + " | ".join(lines)[:width])
            self._screen.flush()

    def _clear(self) -> None:
        if self._screen is not None:
            self._screen.write("\r\x1b[K")
            self._screen.flush()


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
        what: awaited state, which reads well after "timed out waiting for".
        timeout: limit in seconds.
        interval: pause between two calls, in seconds.
        state: function that describes the present state for the error message.

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
