"""GPU benchmark commands, run completely with tiny sizes on the CPU."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def test_gpu_benchmark_commands_write_their_tables(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for number in ("1", "2", "3"):
        out = tmp_path / f"out{number}"
        environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "GPU_WORK": str(tmp_path / "work")}
        done = run_program(
            ["bash", "benchmarks/gpu/run.sh", number, "--dry"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        if number == "1":
            assert " passed" in done.stdout, "tests/gpu run on the CPU"
        tables |= {file.stem: json.loads(file.read_text())["sections"] for file in out.glob("*.json")}
        assert len(list(out.iterdir())) <= 8
        assert all(file.stat().st_size < 16 * 2**20 for file in out.iterdir())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU seconds: {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.0f}")

    assert tables.keys() == {"probe", "kernels", "steps", "profile"}
    assert tables["probe"]["works"] == {"grouped attention, forward and backward": {"value": True}}
    notes = {row.get("note", "").partition(":")[0] for rows in tables["kernels"].values() for row in rows.values()}
    assert notes == {"", "not here"}
    for section in ("attention", "attention: errors", "LM head", "LM head: errors", "matrix products"):
        assert any("note" not in row for row in tables["kernels"][section].values()), section
    right = [row["right"] for rows in tables["kernels"].values() for row in rows.values() if "right" in row]
    assert right == [True, True]
    measured = tables["steps"]["steps"]
    assert [name for name, row in measured.items() if row.get("tokens/s", 0) > 0] == [
        "RL 16k, eager",
        "SFT 16k, best",
        "SFT 16k, best, 2 rows",
    ]
    assert "trl" in measured["SFT 16k, TRL, sdpa"]["note"] or "datasets" in measured["SFT 16k, TRL, sdpa"]["note"]
    recorded = json.loads((tmp_path / "out2" / "profile.json").read_text())["sections"]
    assert recorded["SFT 64 tokens: categories"]["LM head"]["ms"] > 0
    assert recorded["SFT 64 tokens: gaps"]["0 to 2 us"]["launches"] > 0
    assert "attention (fa3) needs GPUs, and gpusPerReplica is 0" in measured["RL 16k, fa3"]["note"]
    categories = tables["profile"]["RL 16k: categories"]
    assert categories["LM head"]["ms"] > 0
    assert categories["GEMM"]["launches"] >= 2 * 7
    assert "CPU" in (tmp_path / "out3" / "memory.txt").read_text()
