"""Use and memory of GPUs from NVML, which needs no CUDA context and no GPU memory, and counts all processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

SAMPLE_SECONDS = 2.0
IDLE_BELOW = 0.05
"""Share of a sample below which a GPU counts as idle."""


@dataclass(frozen=True)
class Sample:
    """State of one GPU at one time."""

    utilization: float | None
    """Share from 0 to 1; None: not reported, for example by MIG slices."""
    used_bytes: int
    size_bytes: int


class Gpus(Protocol):
    """Source of samples."""

    def sample_gpus(self) -> Sequence[Sample]:
        """Return the current state of each GPU, in order."""
        ...


class NvmlGpus:
    """GPUs that NVML shows in this container. Needs nvidia-ml-py.

    Args:
        ids: GPUs to sample, by index or UUID; None: all.

    Raises:
        ImportError: the package is missing.
        Exception: there is no driver or no such GPU; an error of NVML.
    """

    def __init__(self, ids: Sequence[int | str] | None = None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._handles = [
            self._device_handle(one) for one in (range(self._nvml.nvmlDeviceGetCount()) if ids is None else ids)
        ]

    def _device_handle(self, one: int | str) -> object:
        by_index = isinstance(one, int)
        return self._nvml.nvmlDeviceGetHandleByIndex(one) if by_index else self._nvml.nvmlDeviceGetHandleByUUID(one)

    def sample_gpus(self) -> Sequence[Sample]:
        """Return the current state of each GPU; a GPU that does not answer is skipped."""
        found = []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                memory, utilization = self._nvml.nvmlDeviceGetMemoryInfo(handle), None
                with suppress(self._nvml.NVMLError):
                    utilization = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                found.append(Sample(utilization, int(memory.used), int(memory.total)))
        return found


def gpus_here(ids: Sequence[int | str] | None = None) -> Gpus | None:
    """Return the GPUs of this container, or None without the package, a driver or the GPUs.

    Args:
        ids: GPUs to sample, by index or UUID; None: all.
    """
    try:
        return NvmlGpus(ids)
    except Exception:  # NVML has its own error class, in a package that may be missing
        return None
