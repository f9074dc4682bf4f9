"""Memory of one GPU as parts, each with its purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    bytes: float
    why: str = ""
    """Explanation of the size, for messages."""


@dataclass(frozen=True)
class Needs:
    """Memory needs of one role on each of its GPUs."""

    role: str
    """`trainer` or `inference`."""
    gpus: int
    """Number of GPUs of the role."""
    parts: Sequence[Part]
    limit: float
    """Bytes that all parts together may use."""
    limit_is: str
    """Origin of the limit, for messages."""
    remarks: Sequence[str] = ()
    """Additional facts, which do not stop the run."""

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts fit into the limit."""
        return self.total <= self.limit
