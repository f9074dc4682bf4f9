"""Complete run of a GPU machine, with tiny sizes on the CPU: engine, trainer and orchestrator as programs."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.run_local import DRY
from tests.support.programs import run_program
from tests.support.python_path import before

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def test_dry_complete_run_loads_each_version_and_notices_a_wrong_one(tmp_path: Path) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_program(
        [sys.executable, "-m", "benchmarks.gpu.run_rl", "--dry", "--results", str(tmp_path), "--seconds", "3600"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": before(ROOT)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU seconds: {after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime:.0f}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    tables = json.loads((tmp_path / "run.json").read_text())["sections"]
    assert done.stdout.rstrip().endswith((tmp_path / "run.md").read_text().rstrip()), "the table comes last"
    assert {row["result"] for row in tables["parts"].values()} == {"complete"}
    assert tables["parts"].keys() == {"nccl", "colocated", "concurrent", "engine", "ipc"}

    goals = tables["goals"]
    for run, steps in (("A", DRY.steps[0]), ("B", DRY.steps[1])):
        assert goals[f"{run}: versions by file"] | {"note": ""} == {
            "value": steps, "unit": "", "goal": f">= {steps}", "result": "met", "note": "",
        }  # fmt: skip
    assert goals["B: mismatch_kl of a wrong version"]["result"] == "met"
    for name in ("A, in turns: mismatch_kl, largest", "B, side by side, other steps: mismatch_kl, largest"):
        assert goals[name]["result"] == "met", goals[name]
    assert goals["log-probs of engine and transformers"]["result"] == "met"
    assert goals["engine, tokens/s"]["value"] > 0
    assert goals["A: reward of the evaluation, last - first"]["value"] is not None
    for name in ("A: memory of the sleeping engine", "B: idle GPU per step", "C: hand-over by CUDA IPC, longest"):
        assert goals[name]["result"] == "not run"
        assert goals[name]["note"]

    seen = [event["step"] for event in events if event["event"] == "step" and event["run"] == "concurrent"]
    assert seen == [*range(1, DRY.steps[1] + 1)]
    assert tables["hand-over by file, engine alone"]["reload"]["hand-overs"] == DRY.handovers
    assert tables["transfer over gloo to the engine"]["cpu"]["total s"] > 0
