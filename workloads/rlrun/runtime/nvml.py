"""Use and memory of GPUs, as NVML sees them: it needs no CUDA context and no memory of the GPU, and counts all processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

SAMPLE_SECONDS = 2.0
IDLE_BELOW = 0.05
"""A GPU that computes for less than this share of a sample is idle."""


@dataclass(frozen=True)
class Sample:
    """One GPU at one moment."""

    utilization: float | None
    """From 0 to 1; None: the device does not say, as slices of one do not."""
    used_bytes: int
    size_bytes: int


class Gpus(Protocol):
    """A source of samples."""

    def sample(self) -> Sequence[Sample]:
        """Present state of each GPU, in order."""
        ...


class NvmlGpus:
    """GPUs that NVML shows in this container. Needs nvidia-ml-py.

    Args:
        ids: those to look at, by index or UUID; None: all.

    Raises:
        ImportError: the package is missing.
        Exception: there is no driver, or no such GPU, as NVML's own error says.
    """

    def __init__(self, ids: Sequence[int | str] | None = None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._handles = [self._handle(one) for one in (range(self._nvml.nvmlDeviceGetCount()) if ids is None else ids)]

    def _handle(self, one: int | str) -> object:
        by_index = isinstance(one, int)
        return self._nvml.nvmlDeviceGetHandleByIndex(one) if by_index else self._nvml.nvmlDeviceGetHandleByUUID(one)

    def sample(self) -> Sequence[Sample]:
        """Present state of each GPU; one that does not answer is left out."""
        found = []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                memory, utilization = self._nvml.nvmlDeviceGetMemoryInfo(handle), None
                with suppress(self._nvml.NVMLError):
                    utilization = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                found.append(Sample(utilization, int(memory.used), int(memory.total)))
        return found


def gpus_here(ids: Sequence[int | str] | None = None) -> Gpus | None:
    """GPUs of this container; None without the package, a driver or the GPUs.

    Args:
        ids: those to look at, by index or UUID; None: all.
    """
    try:
        return NvmlGpus(ids)
    except Exception:  # NVML's errors are a class of its own, of a package that may be missing
        return None
