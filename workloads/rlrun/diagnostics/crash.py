"""Last Python frames of a crashed process, in a separate file for each process.

The ranks of a group share one log, and the survivors of a crash write their own tracebacks to it at the same moment. Therefore every rank
has its own file for faulthandler, which the launcher reads after a rank has ended.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from itertools import chain
from pathlib import Path

FOLDER_VARIABLE = "RLRUN_CRASHES"
"""Environment variable with the folder for the crash files of a group. Without it, faulthandler writes to stderr."""
BEGIN = "Fatal Python error:"
"""First words of faulthandler's output. Every role enables faulthandler (`failures.ROLE_ENVIRONMENT`)."""
_SIGNALLED = 128
_CURRENT = "Current thread "
_THREAD = "Thread "
_MODULES = "Extension modules:"
_NATIVE = "  (the thread that crashed is native code without Python frames; below are the others, the oldest first)"
_EMPTY = "<no Python frame>"


def record_crashes(name: str) -> None:
    """Make faulthandler write a crash of this process to the file `name` in the folder of its group.

    The file stays open: it is written in a signal handler, when no file can be opened any more.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with suppress(OSError):  # faulthandler continues to write to stderr
            file = os.open(Path(folder) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            faulthandler.enable(file, all_threads=True)


def crash_report(folder: Path, name: str) -> str:
    """Return the report of a process that called `listen(name)`; empty if it did not crash or could not write."""
    try:
        return (folder / name).read_text(errors="replace")
    except OSError:
        return ""


def crash_lines(lines: list[str]) -> list[str] | None:
    """Return the lines of a log about a crash, starting with the latest call of the crashed thread, or None without a crash.

    faulthandler writes the threads from the youngest to the oldest, so the crashed thread is often the last one. If native code without
    Python frames crashed, the main thread comes first, and threads without frames are left out.

    Args:
        lines: lines of the log, without empty ones.
    """
    begin = next((i for i, line in enumerate(lines) if BEGIN in line), None)
    if begin is None:
        return None
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].startswith(_MODULES)), len(lines))
    dump = lines[begin + 1 : end]
    current = next((i for i, line in enumerate(dump) if line.startswith(_CURRENT)), None)
    if current is None:
        threads = _thread_lines(dump)
        return [lines[begin], *([_NATIVE, *chain(*reversed(threads))] if threads else dump)]
    after = next((i for i in range(current + 1, len(dump)) if dump[i].startswith(_THREAD)), len(dump))
    return [lines[begin], *dump[current:after], *dump[:current], *dump[after:]]


def _thread_lines(dump: list[str]) -> list[list[str]]:
    """Lines of each thread with frames, in the order of the dump."""
    begins = [i for i, line in enumerate(dump) if line.startswith(_THREAD)]
    threads = [dump[begin:end] for begin, end in zip(begins, [*begins[1:], len(dump)], strict=True)]
    return [lines for lines in threads if any(_EMPTY not in line for line in lines[1:])]


def describe_end(code: int) -> str:
    """Return how a process ended, as text.

    Args:
        code: exit code of a shell (128 + n for signal n) or of Python's `subprocess` (-n).
    """
    number = -code if code < 0 else code - _SIGNALLED
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was ended by signal {number}" if code < 0 else f"ended with exit code {code}"
    hint = " (often for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
