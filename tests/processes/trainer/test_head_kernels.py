"""The LM head's kernels for GPUs: their numbers in Triton's interpreter, and their machine code for an H100."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.forks import Forks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process that has imported torch, and not Triton, which reads its variables when it is imported."""
    forks = Forks(["torch"], {})
    yield forks
    forks.close()


def output_of(forks: Forks, program: str, **environment: str) -> list[str]:
    """Lines that a program of this folder prints."""
    done = forks.call(f"tests.processes.trainer.{program}", environment=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_they_are_as_near_to_float64_as_their_dtype_allows(forks: Forks) -> None:
    """The tolerances are in `head_kernels`; every case says that it was there."""
    assert len(output_of(forks, "head_kernels", TRITON_INTERPRET="1")) == 2 * 3 + 1 + 3


def test_they_compile_for_an_h100_and_move_16_bytes_at_a_time(forks: Forks, tmp_path: Path) -> None:
    found = {
        line.split()[0]: line.split()[1:]
        for line in output_of(forks, "head_kernels_compiled", TRITON_CACHE_DIR=str(tmp_path))
    }
    assert found.keys() == {"_statistics", "_residual"}
    assert all(int(size) > 0 for size, *_ in found.values())
    assert found["_statistics"][1:] == ["ld:v4", "st:"]
    assert found["_residual"][1:] == ["ld:v4", "st:v4"]
