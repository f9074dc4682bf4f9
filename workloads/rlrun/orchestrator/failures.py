"""Failures that end the run: one line for a person and an exit code."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlrun.protocol import exit_codes
from rlrun.protocol.durable import write_json

_REFUSALS = {errno.ENOSPC: "no space left", errno.EDQUOT: "the quota is used up", errno.EROFS: "it is read-only"}


class RunError(Exception):
    """Ends the orchestrator.

    Args:
        message: what was wrong and what to do, on one line.
        code: exit code of `rlrun.protocol.exit_codes`.
    """

    def __init__(self, message: str, code: int = exit_codes.FAILURE) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def storage(folder: Path) -> Iterator[None]:
    """Turn a volume's refusal to write into a `RunError` that names the folder; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        message = f"cannot write to {folder}: {_REFUSALS[error.errno]}; free or enlarge the volume and start again"
        raise RunError(message, exit_codes.STORAGE) from error


def first_cause(error: BaseException) -> BaseException:
    """The `RunError` inside an exception group, else its first leaf."""
    leaves = _leaves(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RunError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def write_error(folder: Path, message: str, code: int) -> None:
    """Leave `error.json` for whoever started this role; a volume that refuses even that loses it, the log has it still."""
    try:
        write_json(folder / "error.json", {"role": "orchestrator", "message": message, "exit_code": code})
    except OSError:
        return
