"""What a command line with a mistake led to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    what: str
    """The mistake."""
    code: int | None
    """None: it ended with an exception, or started something slow."""
    err: str
    """Standard error."""
    made: list[str]
    """Files that it made."""
    seconds: float
