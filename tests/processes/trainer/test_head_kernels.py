"""GPU kernels of the LM head: their numbers in Triton's interpreter, and their machine code for an H100."""

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
    """Process that has imported torch but not Triton, which reads its variables at import."""
    forks = Forks(["torch"], {})
    yield forks
    forks.close()


def output_of(forks: Forks, program: str, **environment: str) -> list[str]:
    """Return the output lines of a program of this folder."""
    done = forks.call(f"tests.processes.trainer.{program}", environment=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_head_kernels_match_float64_within_dtype_tolerance(forks: Forks) -> None:
    """The tolerances are in `head_kernels`; each case prints a line."""
    assert len(output_of(forks, "head_kernels", TRITON_INTERPRET="1")) == 2 * 3 + 1 + 3


def test_head_kernels_compile_for_h100_with_16_byte_accesses(forks: Forks, tmp_path: Path) -> None:
    found = {
        line.split()[0]: line.split()[1:]
        for line in output_of(forks, "head_kernels_compiled", TRITON_CACHE_DIR=str(tmp_path))
    }
    assert found.keys() == {"_statistics", "_residual"}
    assert all(int(size) > 0 for size, *_ in found.values())
    assert found["_statistics"][1:] == ["ld:v4", "st:"]
    assert found["_residual"][1:] == ["ld:v4", "st:v4"]
