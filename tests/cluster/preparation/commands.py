"""Commands that run for minutes: output in a log, progress lines, and no process left after an interrupt."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress

from .output import last_line

STOP_SIGNALS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0))
"""Signals to end a command, each with the time in seconds until the next, and SIGKILL at last. A shell's background job
ignores SIGINT."""
POLL_SECONDS = 0.2

_stop = threading.Event()


class StoppedError(ClusterError):
    """This process ends its commands: another job failed, or a user interrupted it."""


def run(
    command: Sequence[str],
    log: Path,
    *,
    progress: Progress,
    name: str,
    state: Callable[[str], str] = last_line,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run a command to its end, in a separate process group that does not survive this call.

    Args:
        log: file to which its output is appended.
        progress: receiver of lines about it from time to time.
        name: name of the result, for messages.
        state: function from the output so far to the part done.

    Returns:
        Its exit status.

    Raises:
        ClusterError: it ran longer than `timeout` seconds, or `stop_all` was called (StoppedError).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # a signal reaches the command and all that it has started
        )
    with _ended(process), progress.step(name, lambda: state(text_from(log, start))):
        deadline = time.monotonic() + timeout if timeout is not None else None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=POLL_SECONDS)
            check_allowed(name)
            if deadline is not None and time.monotonic() >= deadline:
                raise ClusterError(f"{name}: {command[0]} ran longer than {timeout:.0f} s: see {log}")


def stop_all() -> None:
    """Stop each `run` of this process: in all threads, present and future."""
    _stop.set()


def check_allowed(name: str) -> None:
    """Raise StoppedError after `stop_all`.

    Args:
        name: name of the work, for the message.
    """
    if _stop.is_set():
        raise StoppedError(f"{name}: stopped")


def allow_all() -> None:
    """Allow commands again after `stop_all`."""
    _stop.clear()


def text_from(log: Path, start: int = 0) -> str:
    """Return the text of a log from an offset in bytes; empty if the file does not exist."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the command's whole group if the block is left before the command ends."""
    try:
        yield
    finally:
        if process.poll() is None:
            try:
                for number, seconds in STOP_SIGNALS:
                    _signal_group(process.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=seconds)
                        break
            finally:  # also if a second Ctrl-C interrupts the wait
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
