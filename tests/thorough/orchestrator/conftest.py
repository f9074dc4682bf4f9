"""Fixtures shared by the orchestrator tests of all tiers."""

from __future__ import annotations

from tests.support.orchestrator.fixtures import log_to_the_test, tokenizer_folder

__all__ = ["log_to_the_test", "tokenizer_folder"]
