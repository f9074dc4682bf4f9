"""Record of a fork, `fork.json` in the new run's folder: the run and the step that it was forked from, and what was changed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True)
class ForkedFrom:
    """Beginning of a forked run."""

    run: str
    """Name of the other run."""
    uid: str
    step: int
    attempt: int
    """The attempt that wrote the checkpoint."""
    folder: str
    """The other run's folder, when it was forked."""
    changed: tuple[str, ...] = ()
    """Fields that differ from the other run's manifest, each with both values."""


_ADAPTER = TypeAdapter(ForkedFrom)


def fork_document(fork: ForkedFrom) -> str:
    """Content of the file."""
    return json.dumps({"forkedFrom": asdict(fork)}, indent=1) + "\n"


def read_fork(path: Path) -> ForkedFrom | None:
    """The record in a run's folder; None: the run is no fork, or something else has damaged it."""
    try:
        return fork_of(path.read_bytes())
    except OSError:
        return None


def fork_of(content: bytes) -> ForkedFrom | None:
    """The record that `fork_document` made a document of; None: it is damaged."""
    try:
        return _ADAPTER.validate_python(json.loads(content)["forkedFrom"])
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None
