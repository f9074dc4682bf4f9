"""The LM head's kernels for GPUs, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_they_are_as_near_to_float64_as_their_dtype_allows() -> None:
    """The tolerances are in `head_kernels`; every case says that it was there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.trainer.head_kernels"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2 * 3 + 1 + 3, done.stdout
