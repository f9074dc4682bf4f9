"""Fixtures of the orchestrator's tests: its simulation on the import path, the tiny model's tokenizer, the log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

sys.path.insert(0, str(Path(__file__).parent / "simulation"))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with only a tokenizer."""
    from rlrun.trainer.modeling.tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def log_to_the_test() -> Iterator[None]:
    """Keep the log of the interpreter, which a test of the process configures."""
    yield
    logger.remove()
    logger.add(lambda message: print(message, end="", file=sys.stderr))
