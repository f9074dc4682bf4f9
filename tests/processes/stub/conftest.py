"""Path of the harness, and forked programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "harness"))


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the programs of stub runs: these tests are about runs, not about the start of programs."""
    from stub_run import StubRun

    monkeypatch.setattr(StubRun, "is_forked", True)
