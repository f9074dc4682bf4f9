"""One GPU's memory as parts, each with what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    bytes: float
    why: str = ""
    """Derivation, for people."""


@dataclass(frozen=True)
class Needs:
    """Need of one role on each of its GPUs."""

    role: str
    """`trainer` or `inference`."""
    gpus: int
    """GPUs of the role."""
    parts: Sequence[Part]
    limit: float
    """Bytes that the parts may have together."""
    limit_is: str
    """Source of the limit, for people."""
    remarks: Sequence[str] = ()
    """Facts that follow, none of which stops the run."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """True if the parts have room."""
        return self.total <= self.limit
