"""GPU use of one role, in the launcher's record and in the metrics of pods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GpuUse:
    """GPU use of one role at one time."""

    gpus: int
    """Number of measured GPUs."""
    utilization: float | None
    """Share of the last sample in which a kernel ran, mean over the GPUs; None: not reported, for example by MIG slices."""
    used_bytes: int
    """Used memory of all of them."""
    size_bytes: int
    """Memory size of all of them."""
    idle: float | None = None
    """Share of the attempt's time in which they computed almost nothing; None: not reported."""
    of: int = 0
    """Number of the role's GPUs, if not all were measured."""


def use_document(use: GpuUse) -> dict[str, Any]:
    """Return a use as a JSON document."""
    return asdict(use)


def read_use(found: object) -> GpuUse | None:
    """Return the use in an untrusted document, or None if it has none."""
    if not isinstance(found, Mapping):
        return None
    gpus, used, size = (_read_count(found.get(name)) for name in ("gpus", "used_bytes", "size_bytes"))
    if not gpus or used is None or size is None:
        return None
    return GpuUse(gpus, _read_share(found.get("utilization")), used, size, _read_share(found.get("idle")))


def mean_share(shares: Sequence[float]) -> float | None:
    """Return the mean of shares, or None if there are none."""
    return sum(shares) / len(shares) if shares else None


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _read_share(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return min(1.0, max(0.0, float(value))) if good and isinstance(value, int | float) else None
