"""Tests for one CUDA GPU, started by hand: `pytest tests/gpu`. No tier collects them; without a GPU each is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlrun.trainer.group import Group


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs one CUDA GPU")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cuda() -> Iterator[Group]:
    """A group of this process alone, on the GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, device, init_device_mesh("cuda", (1,)))
    dist.destroy_process_group()
