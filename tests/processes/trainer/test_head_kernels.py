"""The LM head's kernels for GPUs: their numbers in Triton's interpreter, and their machine code for an H100."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def output_of(program: str, **environment: str) -> list[str]:
    """Lines that a program of this folder prints."""
    done = run_program(
        [sys.executable, "-m", f"tests.processes.trainer.{program}"], cwd=ROOT, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_they_are_as_near_to_float64_as_their_dtype_allows() -> None:
    """The tolerances are in `head_kernels`; every case says that it was there."""
    assert len(output_of("head_kernels", TRITON_INTERPRET="1")) == 2 * 3 + 1 + 3


def test_they_compile_for_an_h100_and_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    found = {
        line.split()[0]: line.split()[1:] for line in output_of("head_kernels_compiled", TRITON_CACHE_DIR=str(tmp_path))
    }
    assert found.keys() == {"_statistics", "_residual"}
    assert all(int(size) > 0 for size, *_ in found.values())
    assert found["_statistics"][1:] == ["ld:v4", "st:"]
    assert found["_residual"][1:] == ["ld:v4", "st:v4"]
