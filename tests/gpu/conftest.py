"""Tests for one CUDA GPU, started by hand: `pytest tests/gpu`. No tier collects them; without a GPU each is skipped.

With `RLRUN_GPU_DRY=1`, tests that do not measure GPU memory run on the CPU in float32, which finds broken tests without
a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlrun.trainer.ranks.group import Group

DRY = os.environ.get("RLRUN_GPU_DRY", "0") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs one CUDA GPU")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            measures = item.get_closest_marker("measures_gpu_memory") is not None
            if not torch.cuda.is_available() and (measures or not DRY):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU in a dry run."""
    return torch.device("cpu") if DRY and not torch.cuda.is_available() else torch.device("cuda", 0)


@pytest.fixture(scope="session")
def dtype(device: torch.device) -> torch.dtype:
    """Compute dtype of the trainer on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(scope="session")
def alone(device: torch.device) -> Iterator[Group]:
    """A group with this process as its only rank."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, device, init_device_mesh(device.type, (1,)))
    dist.destroy_process_group()
