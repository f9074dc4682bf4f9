"""For every tier."""

from __future__ import annotations

import os

import pytest

from tests import fixture_failures

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported. Threads that wait for each other spin: on busy cores a tiny model's step takes fifty times as long."""


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin, and not as hooks of this folder: those would not see fixtures of a whole session."""
    config.pluginmanager.register(fixture_failures)
