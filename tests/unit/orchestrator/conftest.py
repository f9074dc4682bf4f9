"""Fixtures of the orchestrator tests of all tiers."""

from __future__ import annotations

from tests.support.orchestrator.fixtures import log_to_the_test

__all__ = ["log_to_the_test"]
