"""Stacks of a process, on request and after a crash.

On request: a pod may not trace its processes, so each process writes its own stacks, which show where a hanging role is. `answer_requests`
makes the process append them to a file at each `SIGNAL`, in C code that needs neither the interpreter's lock nor memory. `request_stacks`
requests them before a hanging role is killed.

After a crash: faulthandler writes the last Python frames. The ranks of a group share one log, and the survivors of a crash write their own
tracebacks to it at the same moment. Therefore every rank has its own file for faulthandler, which the launcher reads after the rank has
ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

SIGNAL = signal.SIGUSR2
"""Signal that torch, vLLM and kopf do not use. Workers of environments use SIGUSR1 for requests of the orchestrator."""
FILE_VARIABLE = "RLRUN_STACKS_FILE"
"""Environment variable with the file to which all processes of a role append. Without it, they write to stderr."""
SUFFIX = ".stacks.txt"
"""Suffix of the file's name after the pod's name. The file is next to the log."""
PATIENCE_SECONDS = 5.0
"""Time after a stop request within which a role that has nothing to save ends."""
MAX_BYTES = 1024 * 1024
"""Size limit of one dump. Longer dumps are cut."""
ANSWER_SECONDS = 3.0
"""Longest wait for one process. A process that is frozen, or inside a hanging system call, does not answer."""
ALL_SECONDS = 10.0
"""Longest wait for all processes."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_QUIET_SECONDS = 0.1
"""Time without new output after which a dump counts as complete."""
_LOOK_SECONDS = 0.01
_COMMAND_CHARACTERS = 160


def answer_requests() -> None:
    """Make this process and its forked children write the stack of their main thread at each `SIGNAL`.

    Only the main thread is written, and `request_stacks` sends the signal to it. Frames of other threads change while they are read
    without the interpreter's lock, which ends the process with a segmentation fault
    (https://github.com/python/cpython/issues/116008); see decision 5.
    """
    path, file = os.environ.get(FILE_VARIABLE), 2
    if path:
        with suppress(OSError):  # a process that may not write the file uses its own log
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=False)


def seconds_until_stacks(grace_seconds: float) -> float:
    """Return the seconds from a stop request to the request for stacks, which is long before the kill."""
    return min(PATIENCE_SECONDS, grace_seconds / 4)


def is_listening(pid: int, file: Path) -> bool:
    """Return whether a process would answer `SIGNAL` into `file`. Other processes would be ended by it, or use it for another purpose.

    Of a role that denies inspection (see `refuse_inspection`), only its handled signals are visible; such a role has called
    `answer_requests` before.
    """
    try:
        wanted, process = file.stat(), Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        if not int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
            return False
        try:
            return any(_is_same_file(entry, wanted) for entry in (process / "fd").iterdir())
        except PermissionError:
            return int(status["Uid"].split()[0]) == os.getuid()
    except (OSError, KeyError, ValueError):  # the process has ended, or belongs to another user
        pass
    return False


def _is_same_file(descriptor: Path, wanted: os.stat_result) -> bool:
    # Compared by inode, because names differ between mount namespaces.
    try:
        return os.path.samestat(descriptor.stat(), wanted)
    except FileNotFoundError:  # closed in the meantime
        return False


def request_stacks(pids: Iterable[int], file: Path, *, why: str) -> bytes:
    """Make processes write their stacks, one after the other. Processes that do not listen are skipped.

    Args:
        pids: processes whose stacks are requested.
        file: value of `RLRUN_STACKS_FILE` in their environment.
        why: first line of the dump.

    Returns:
        Written dump, at most `MAX_BYTES`; empty if no process listens.

    Raises:
        OSError: the file cannot be written.
    """
    listening = [pid for pid in pids if is_listening(pid, file)]
    if not listening:
        return b""
    began = file.stat().st_size
    deadline = time.monotonic() + ALL_SECONDS
    with file.open("ab", buffering=0) as out:
        out.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {why}\n".encode())
        for pid in listening:
            if file.stat().st_size - began > MAX_BYTES or time.monotonic() > deadline:
                out.write(f"\n== process {pid}: skipped, the limit of size or time is reached\n".encode())
                continue
            out.write(f"\n== process {pid}: {_command_line(pid)}\n".encode())
            size = file.stat().st_size  # read before the request, because the process may answer immediately
            try:
                signal_main_thread(pid, SIGNAL)
            except OSError:
                out.write(b"the process has ended\n")
                continue
            if not _wait_for_answer(file, size):
                out.write(b"no answer: the process is frozen, or inside a hanging system call\n")
    with file.open("rb") as written:
        written.seek(began)
        dump = written.read(MAX_BYTES + 1)
    return dump if len(dump) <= MAX_BYTES else dump[:MAX_BYTES] + b"\n...\n"


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread. A signal to the process could be handled by any thread.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    if _LIBC.tgkill(pid, pid, int(number)):
        raise OSError(ctypes.get_errno(), f"cannot send a signal to process {pid}")


def _wait_for_answer(file: Path, size: int) -> bool:
    """Wait until the file has grown beyond `size` bytes and stops growing. Returns False if it does not grow."""
    begin = size
    asked = changed = time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        now, found = time.monotonic(), file.stat().st_size
        if found != size:
            size, changed = found, now
        elif size > begin and now - changed >= _QUIET_SECONDS:
            return True
        if now - asked > ANSWER_SECONDS:
            return size > begin


def _command_line(pid: int) -> str:
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"
    line = " ".join(words.split())
    return line if len(line) <= _COMMAND_CHARACTERS else line[: _COMMAND_CHARACTERS - 3] + "..."


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
    """Return the report of a process that called `record_crashes(name)`; empty if it did not crash or could not write."""
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
