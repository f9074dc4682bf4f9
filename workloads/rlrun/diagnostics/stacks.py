"""Stacks of a process, on request: the last word of a role that hangs.

A pod may not trace its processes, so each writes its own stacks: `listen` makes it append them to a file when `SIGNAL` comes, from C code
that needs neither the interpreter's lock nor memory. They are asked for (`ask`) before a role that does not end by itself is killed.
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
"""torch, vLLM and kopf leave it alone; environments' workers have SIGUSR1 for the orchestrator's own questions."""
FILE_VARIABLE = "RLRUN_STACKS_FILE"
"""Environment variable: where a role's processes write, all of them into one file; without it to stderr."""
SUFFIX = ".stacks.txt"
"""After the pod's name, beside its log."""
PATIENCE_SECONDS = 5.0
"""A role that has nothing to save ends sooner after it was asked to stop."""
MAX_BYTES = 1024 * 1024
"""Size limit of one dump; the rest is cut off."""
ANSWER_SECONDS = 3.0
"""Longest wait for one process; one that is frozen, or inside a hanging system call, does not answer."""
ALL_SECONDS = 10.0
"""Longest wait for all of them."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_QUIET_SECONDS = 0.1
"""Silence after which a process has written all."""
_LOOK_SECONDS = 0.01
_COMMAND_CHARACTERS = 160


def listen() -> None:
    """Make this process, and those that it forks, write at each `SIGNAL` what their main thread does.

    That thread alone, which `ask` sends the signal to. Frames of others change while they are read without the interpreter's lock,
    which ends the process with a segmentation fault (https://github.com/python/cpython/issues/116008); see decision 16.
    """
    path, file = os.environ.get(FILE_VARIABLE), 2
    if path:
        with suppress(OSError):  # a process that may not write there uses its own log
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=False)


def seconds_until_stacks(grace_seconds: float) -> float:
    """Seconds from the request to stop to the question what a role does: long before it is killed."""
    return min(PATIENCE_SECONDS, grace_seconds / 4)


def is_listening(pid: int, file: Path) -> bool:
    """True if a process would answer `SIGNAL` into `file`; any other would be ended by it, or mean something else.

    Of a role that refuses inspection (see `privacy`) only its caught signals can be seen: it has called `listen` before.
    """
    try:
        wanted, process = file.stat(), Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        if not int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
            return False
        try:
            return any(_is(entry, wanted) for entry in (process / "fd").iterdir())
        except PermissionError:
            return int(status["Uid"].split()[0]) == os.getuid()
    except (OSError, KeyError, ValueError):  # it is gone, or not ours to look at
        pass
    return False


def _is(descriptor: Path, wanted: os.stat_result) -> bool:
    # By the inode: names differ between mount namespaces.
    try:
        return os.path.samestat(descriptor.stat(), wanted)
    except FileNotFoundError:  # closed meanwhile
        return False


def request_stacks(pids: Iterable[int], file: Path, *, why: str) -> bytes:
    """Let processes write their stacks, one after the other; those that do not listen are left alone.

    Args:
        pids: the processes to ask.
        file: what `RLRUN_STACKS_FILE` names in their environment.
        why: first line of the dump.

    Returns:
        what was written, `MAX_BYTES` at most; empty when none listens.

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
                out.write(f"\n== process {pid}: not asked any more\n".encode())
                continue
            out.write(f"\n== process {pid}: {_command_line(pid)}\n".encode())
            size = file.stat().st_size  # before it is asked: it may have answered when its asker goes on
            try:
                signal_main_thread(pid, SIGNAL)
            except OSError:
                out.write(b"it has ended\n")
                continue
            if not _wait_for_answer(file, size):
                out.write(b"no answer: it is frozen, or inside a system call that hangs\n")
    with file.open("rb") as written:
        written.seek(began)
        told = written.read(MAX_BYTES + 1)
    return told if len(told) <= MAX_BYTES else told[:MAX_BYTES] + b"\n...\n"


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the thread whose stack is to be written: one to the process may be taken by any.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    if _LIBC.tgkill(pid, pid, int(number)):
        raise OSError(ctypes.get_errno(), f"cannot ask process {pid}")


def _wait_for_answer(file: Path, size: int) -> bool:
    """Wait until the file has grown beyond `size` bytes and grows no more; False when it does not grow."""
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
