"""Optimizers on matrices that are sharded over ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import finish

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_two_ranks_compute_same_update_as_one(tmp_path: Path) -> None:
    """The program compares; each layout prints a line."""
    command = [sys.executable, "-m", "tests.processes.trainer.optimizer_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            output, error = finish(process)
            assert process.returncode == 0, error
            assert output.split() == [*["muon"] * 3, *["coded"] * 2]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
