"""Stacks of a process on request, to report what a hanging role does.

A pod may not trace its processes, so each process writes its own stacks: `answer_requests` makes it append them to a file at each `SIGNAL`. This
happens in C code that needs neither the interpreter's lock nor memory. `request_stacks` requests them before a role that does not end is
killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
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
    (https://github.com/python/cpython/issues/116008); see decision 16.
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

    Of a role that denies inspection (see `privacy`), only its handled signals are visible; such a role has called `answer_requests` before.
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
        pids: processes to ask.
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
