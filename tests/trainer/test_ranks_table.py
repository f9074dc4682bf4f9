"""Memory shares of many ranks, compared with `rlrun fit` for models without memory."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.full


def test_rank_memory_shares_match_fit() -> None:
    command = [sys.executable, "-m", "benchmarks.ranks", "--models", "Qwen/Qwen3-0.6B", "--ranks", "8", "512"]
    done = run_program(command)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"\| (8|512) \| (1|2) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", done.stdout)
    assert len(rows) == 4
    found = {(int(ranks), int(copies)): [float(value) for value in values] for ranks, copies, *values in rows}
    for held, fit, ratio, _ in found.values():
        assert held == pytest.approx(fit, abs=0.002)
        assert ratio == pytest.approx(1, abs=0.02), "small tensors do not divide evenly"
    assert found[8, 1][0] == pytest.approx(64 * found[512, 1][0], rel=0.2)
    assert found[8, 2][0] == pytest.approx(2 * found[8, 1][0], rel=0.02)
