"""Last Python frames of a process that a signal of its own making ended, in a file that is its alone.

Ranks of a group share one log, and the survivors of a crash write their own tracebacks into it at the same moment. So every rank has
a file of its own for faulthandler, which their launcher reads once one of them has ended.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from itertools import chain
from pathlib import Path

FOLDER_VARIABLE = "RLRUN_CRASHES"
"""Environment variable: where the processes of a group write what they were doing when they crashed; without it to stderr."""
BEGIN = "Fatal Python error:"
"""Beginning of faulthandler's output; every role runs with it (`failures.ROLE_ENVIRONMENT`)."""
_SIGNALLED = 128
_CURRENT = "Current thread "
_THREAD = "Thread "
_MODULES = "Extension modules:"
_NATIVE = "  (the thread that crashed is native code without Python frames; below are the others, the oldest first)"
_EMPTY = "<no Python frame>"


def listen(name: str) -> None:
    """Write what this process does when it crashes to the file `name` of the folder of its group.

    The file stays open: it is written from the signal's handler, when nothing can be opened any more.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with suppress(OSError):  # faulthandler goes on writing to stderr
            file = os.open(Path(folder) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            faulthandler.enable(file, all_threads=True)


def crash_report(folder: Path, name: str) -> str:
    """Report of a process that called `listen(name)`; empty when it did not crash, or could not write."""
    try:
        return (folder / name).read_text(errors="replace")
    except OSError:
        return ""


def crash_lines(lines: list[str]) -> list[str] | None:
    """The part of a log about a crash, the latest call of the thread that crashed first; None: there is none.

    faulthandler writes the threads from the youngest to the oldest, so the one that matters is often the last: where native code crashed
    that has no frames, the main thread comes first, and threads without frames are left out.

    Args:
        lines: of the log, without empty ones.
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
    """Lines of each thread that has frames, in the order of the dump."""
    begins = [i for i, line in enumerate(dump) if line.startswith(_THREAD)]
    threads = [dump[begin:end] for begin, end in zip(begins, [*begins[1:], len(dump)], strict=True)]
    return [lines for lines in threads if any(_EMPTY not in line for line in lines[1:])]


def describe_end(code: int) -> str:
    """Way a process ended, in words.

    Args:
        code: of its end: that of a shell, 128 + n for signal n, or that of Python's `subprocess`, -n.
    """
    number = -code if code < 0 else code - _SIGNALLED
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was ended by signal {number}" if code < 0 else f"ended with exit code {code}"
    hint = " (often for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
