"""Optimizers on matrices that are sharded over ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import finish

ROOT = Path(__file__).parents[3]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_same_update_as_one(count: int, tmp_path: Path) -> None:
    """The program compares, and prints a line for each layout: only matrices and experts of the fifth are gathered by all ranks."""
    command = [sys.executable, "-m", "tests.processes.trainer.optimizer_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        for process in ranks:
            output, error = finish(process)
            assert process.returncode == 0, error
            divided = ["make_muon 0"] * (8 if count == 4 else 4)
            assert output.splitlines() == [*divided[:4], "make_muon 7", *divided[4:], *["make_adamw8bit 0"] * 2]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
