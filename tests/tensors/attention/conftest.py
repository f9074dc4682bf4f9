"""Stand-ins of flash kernels, and the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger

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
