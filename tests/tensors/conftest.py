"""One rank in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlrun.trainer.ranks.group import Group
from tests.support.process_groups import created_groups_destroyed


@pytest.fixture(scope="session")
def solo() -> Iterator[Group]:
    """Process group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def destroy_created_groups() -> Iterator[None]:
    """Destroy the process groups that a test creates: its savers, above all."""
    with created_groups_destroyed():
        yield
