"""Errors that a person can act on: one line, an exit code, and a file that tells the launcher."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlrun.protocol import exit_codes
from rlrun.protocol.durable import create_json

ERROR_FILE = "error.json"
ROLE = "trainer"
_FULL = {
    errno.ENOSPC: "the volume is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the volume is read-only",
}


class RoleError(Exception):
    """Ends the role with a message for a person and an exit code, without a traceback."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def storage_errors(folder: Path, doing: str) -> Iterator[None]:
    """Turn a full or read-only volume into a `RoleError` that names `folder`; other errors pass.

    Torch wraps errors of its checkpoint writers, so the chain of causes is searched too.
    """
    try:
        yield
    except RoleError:
        raise
    except Exception as error:
        reason = _storage_reason(error)
        if reason is None:
            raise
        message = f"cannot {doing} in {folder}: {reason}; make space and start again"
        raise RoleError(message, exit_codes.STORAGE) from error


def _storage_reason(error: BaseException) -> str | None:
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno in _FULL:
            return _FULL[current.errno]
        pending += [current.__cause__, current.__context__]
        failures = getattr(current, "failures", None)  # torch's CheckpointException: rank -> (exception, traceback)
        if isinstance(failures, dict):
            pending += [failure[0] for failure in failures.values()]
    text = str(error)
    return next((reason for code, reason in _FULL.items() if f"[Errno {code}]" in text), None) or (
        _FULL[errno.ENOSPC] if "No space left on device" in text else None
    )


def write_error(folder: Path, error: RoleError) -> None:
    """Write `error.json` in the role's log folder. The first rank that fails is the cause, so a later one never replaces it."""
    with suppress(OSError):  # told already by another rank, or the volume is full: the log and the exit code still tell
        create_json(folder / ERROR_FILE, {"role": ROLE, "message": str(error), "exit_code": error.code})


def read_error(folder: Path) -> RoleError | None:
    """The error that ended the group, if it left one."""
    try:
        document = json.loads((folder / ERROR_FILE).read_text())
        return RoleError(str(document["message"]), int(document["exit_code"]))
    except (OSError, ValueError, KeyError):
        return None
