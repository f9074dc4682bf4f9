"""Record of a fork, `fork.json` in the new run's folder: the source run, its step, and the changed fields."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True)
class ForkedFrom:
    """Origin of a forked run."""

    run: str
    """Name of the other run."""
    uid: str
    step: int
    attempt: int
    """Attempt that wrote the checkpoint."""
    folder: str
    """Folder of the other run at the time of the fork."""
    changed: tuple[str, ...] = ()
    """Fields that differ from the other run's manifest, each with both values."""


_ADAPTER = TypeAdapter(ForkedFrom)


def fork_document(fork: ForkedFrom) -> str:
    """Return the content of the file."""
    return json.dumps({"forkedFrom": asdict(fork)}, indent=1) + "\n"


def read_fork(path: Path) -> ForkedFrom | None:
    """Return the record in a run's folder, or None if the run is not a fork or the file is damaged."""
    try:
        return fork_of(path.read_bytes())
    except OSError:
        return None


def fork_of(content: bytes) -> ForkedFrom | None:
    """Return the record in a document of `fork_document`, or None if it is damaged."""
    try:
        return _ADAPTER.validate_python(json.loads(content)["forkedFrom"])
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None
