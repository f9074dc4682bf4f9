"""Outcome of a command line with a mistake."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command line."""

    what: str
    """The mistake."""
    code: int | None
    """Exit code; None if the command raised an exception or started slow work."""
    err: str
    """Standard error."""
    made: list[str]
    """Files that the command created."""
    seconds: float
    out: str = ""
    """Standard output."""
    unrepaired: str | None = None
    """Outcome of the command with the message's fix, if it failed again."""
