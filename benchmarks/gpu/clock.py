"""Milliseconds, bytes and errors of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def milliseconds(work: Callable[[], object], device: torch.device, *, repeats: int = 10, warmup: int = 3) -> float:
    """Median of single runs, each timed on the device itself."""
    for _ in range(warmup):
        work()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            found.append(float(begin.elapsed_time(end)))
        else:
            began = time.perf_counter()
            work()
            found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def peak_gib(work: Callable[[], object], device: torch.device) -> float | None:
    """GiB that a run takes above what there was; None where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def distance(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference, relative to the exact norm, in float64."""
    exact = exact.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


def free(device: torch.device) -> None:
    """Give back what a row has left."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
