"""Stand-ins of flash kernels, one rank in this process, and its log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.device_mesh import init_device_mesh

from rlrun.trainer.ranks.group import Group
from tests.tensors.attention import stand_ins


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flash kernel, on the CPU."""
    stand_ins.install(monkeypatch)


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Lines of the log."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(handler)


@pytest.fixture(scope="session")
def solo() -> Iterator[Group]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()
