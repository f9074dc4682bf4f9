"""Failure of a role: a one-line message, an exit code, and a file for its launcher."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlrun.diagnostics.stacks import crash_lines
from rlrun.diagnostics.symptoms import symptom_of
from rlrun.protocol.files.durable import create_json, write_json
from rlrun.protocol.files.paths import Role
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls

ERROR_FILE = "error.json"
ERROR_DIR_VARIABLE = "RLRUN_ERROR_DIR"
"""Environment variable: second folder for `error.json`, private to the process's launcher. Unlike the role's log folder it is empty at
the start, is not shared with other pods of the role, and is writable when the run's volume is full."""
FULL_BYTES = 1024 * 1024
"""Free bytes below which a volume counts as full: roles then fail in arbitrary ways, and cannot write their message to that volume."""
_REFUSALS = {
    errno.ENOSPC: "the volume is full (No space left on device)",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the volume is read-only",
    errno.EIO: "the volume fails (Input/output error)",
    errno.ESTALE: "the volume fails (Stale file handle)",
    errno.ETIMEDOUT: "the volume does not answer (Connection timed out)",
}
FAILING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Error numbers of a failing volume, for reads and writes; the other numbers mean that it only refuses writes."""
_IN_TEXT = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""Error numbers in error texts of other libraries: torch's writers, safetensors."""

ROLE_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""Environment of every role's processes: their output is complete when they die, and a crash of native code prints Python's stack."""


class RoleError(Exception):
    """Error that ends a role without a traceback.

    Args:
        message: cause and fix, on one line.
        code: exit code of `rlrun.runtime.exit_codes`.
        follows: whether the error only follows from the loss of another process of the role, whose own message says more.
    """

    def __init__(self, message: str, code: int = exit_codes.FAILURE, *, follows: bool = False) -> None:
        super().__init__(message)
        self.code, self.follows = code, follows


class AbsentDataError(RoleError):
    """Data is missing on this machine only because the hub does not respond, or is disabled here. The pods of a run may have it."""


@contextmanager
def storage_errors(folder: Path, doing: str = "write") -> Iterator[None]:
    """Convert a volume's refusal or failure into a `RoleError` that names `folder`; other errors pass.

    Libraries wrap the errors of their writers, so the chain of causes is searched too.
    """
    try:
        yield
    except RoleError:
        raise
    except Exception as error:
        number = refusal_number(error)
        if number is None:
            raise
        message = f"cannot {doing} in {folder}: {_REFUSALS[number]}; {volume_remedy(number)} and start the run again"
        raise RoleError(message, exit_codes.STORAGE) from error


def volume_remedy(number: int | None) -> str:
    """Return the fix for a volume with this error number."""
    if number in FAILING:
        return "repair the storage, or the connection to it,"
    return "make it writable" if number == errno.EROFS else "make space"


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for a role that this error ends: the code of storage if the volume caused it, so that it does not count.

    A timed-out connection counts as the volume's only if the error names a file, because sockets time out with the same number.
    """
    number = refusal_number(error)
    if number is not None and (number != errno.ETIMEDOUT or _names_file(error)):
        return exit_codes.STORAGE
    return error.code if isinstance(error, RoleError) else exit_codes.FAILURE


def _names_file(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT and error.filename is not None:
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal_number(error: BaseException) -> int | None:
    """Return the number of a volume's refusal or failure (a key of `_REFUSALS`) that caused the error, or None for another cause."""
    # Search causes, contexts and torch's failures of other ranks; chains may be circular.
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        number = current.errno if isinstance(current, OSError) else None
        if number is None and (match := _IN_TEXT.search(str(current))):
            number = int(match[1] or match[2])
        if number in _REFUSALS:
            return number
        pending += [current.__cause__, current.__context__]
        failures = getattr(current, "failures", None)  # torch's CheckpointException: rank -> (exception, traceback)
        if isinstance(failures, dict):
            pending += [failure[0] for failure in failures.values()]
    return None


def telling_lines(text: str, count: int = 15) -> list[str]:
    """Return at most `count` lines from the end of a log that explain why a process ended.

    These are the first lines of a crash (with its latest call), else the lines up to the most informative one (torchrun and other ranks
    print more after it), else the last lines.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    crash = crash_lines(lines)
    if crash is not None:
        chosen = crash[:count]
    else:
        found = symptom_of(text)
        chosen = lines[: found.index + 1][-count:] if found is not None else lines[-count:]
    return [escape_controls(line) for line in chosen]


def volume_is_full(root: Path) -> bool:
    """Return whether the volume of `root` is full; False if that is unknown."""
    try:
        return shutil.disk_usage(root).free < FULL_BYTES
    except OSError:
        return False


def write_error(folder: Path | None, role: Role, error: RoleError) -> None:
    """Write `error.json` in the role's log folder and in the folder of `RLRUN_ERROR_DIR`.

    The first process of a role that fails is the cause: a later one replaces its error only if that error just follows from another.

    Args:
        folder: log folder of the role, or None if it is not known yet.
        role: failed role.
        error: message and exit code.
    """
    document: dict[str, str | int] = {
        "role": role,
        "message": str(error),
        "exit_code": error.code,
        "follows": error.follows,
    }
    private = os.environ.get(ERROR_DIR_VARIABLE)
    for place in (folder, Path(private) if private else None):
        if place is not None:
            with suppress(OSError):  # another process was first, or the volume is full: log and exit code remain
                _write_first(place / ERROR_FILE, document)


def _write_first(path: Path, document: dict[str, str | int]) -> None:
    try:
        create_json(path, document)
    except FileExistsError:
        earlier = read_error(path.parent)
        if document["follows"] or earlier is None or not earlier.follows:
            raise
        write_json(path, document)


def read_error(folder: Path) -> RoleError | None:
    """Return the error that ended the role, or None if it left none."""
    try:
        document = json.loads((folder / ERROR_FILE).read_text())
        follows = bool(document.get("follows", False))  # absent in files of older releases
        return RoleError(str(document["message"]), int(document["exit_code"]), follows=follows)
    except (OSError, ValueError, KeyError):
        return None
