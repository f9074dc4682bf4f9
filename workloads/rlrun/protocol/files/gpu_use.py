"""Use of the GPUs of one role, as a launcher's record has it, and as metrics of pods do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GpuUse:
    """GPUs of one role at one moment."""

    gpus: int
    """GPUs that were measured."""
    utilization: float | None
    """Share of the last sample in which a kernel ran, mean over the GPUs; None: they do not say, as slices of one do not."""
    used_bytes: int
    """Memory in use, of all of them."""
    size_bytes: int
    """Memory of all of them."""
    idle: float | None = None
    """Share of the attempt's time so far in which they computed next to nothing; None: they do not say."""
    of: int = 0
    """GPUs of the role, where not all were measured."""


def use_document(use: GpuUse) -> dict[str, Any]:
    """A use as JSON has it."""
    return asdict(use)


def read_use(found: object) -> GpuUse | None:
    """The use in a document, which anybody may have written; None: there is none."""
    if not isinstance(found, Mapping):
        return None
    gpus, used, size = (_read_count(found.get(name)) for name in ("gpus", "used_bytes", "size_bytes"))
    if not gpus or used is None or size is None:
        return None
    return GpuUse(gpus, _read_share(found.get("utilization")), used, size, _read_share(found.get("idle")))


def mean_share(shares: Sequence[float]) -> float | None:
    """Mean of shares; None: there is none."""
    return sum(shares) / len(shares) if shares else None


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _read_share(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return min(1.0, max(0.0, float(value))) if good and isinstance(value, int | float) else None
