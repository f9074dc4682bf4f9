"""Fixtures: stand-ins of flash kernels, and captured log lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger

from tests.tensors.attention import stand_ins


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a CPU stand-in of every flash kernel."""
    stand_ins.install(monkeypatch)


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Collect the logged lines."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(handler)
