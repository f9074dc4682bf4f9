"""Configuration of every tier."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests import fixture_failures, hang_limit

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported. Threads that wait for each other spin: on busy cores a tiny model's step takes fifty times as long."""

settings.register_profile("any-load", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")
"""Hypothesis bounds an example's time on the clock, by 200 ms, and the time to draw some; on busy cores both say nothing."""


def pytest_configure(config: pytest.Config) -> None:
    """Register plugins: hooks of this folder would not see fixtures of a whole session."""
    config.pluginmanager.register(fixture_failures)
    config.pluginmanager.register(hang_limit)


def pytest_collection_finish() -> None:
    """Exclude imported and collected objects from all later garbage collections: they stay, and tests of programs make
    garbage by the million."""
    gc.collect()
    gc.freeze()
