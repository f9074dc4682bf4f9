"""Forked programs of stub runs: same environment, output, files and exit codes as started programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stub_run import IMPORT_PATH, StubRun, stub_forks, stub_run

from rlrun.runtime import exit_codes
from tests.support.forks import Forked
from tests.support.programs import run_program, wait_for

REPORT = "tests.processes.stub.harness.start_report"


@pytest.mark.parametrize(
    ("way", "code"), [("end", 0), ("code", 78), ("text", 1), ("at-once", 5), ("killed", -9), ("terminated", -15)]
)
def test_forked_program_starts_and_exits_like_started_one(way: str, code: int, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "HOME"}
    variables |= {"PYTHONPATH": IMPORT_PATH, "ONE": "of this start"}
    log = tmp_path / "log"
    forked = stub_forks().start(REPORT, way, log=log, environment=variables, exact=True)
    started = run_program(
        [sys.executable, "-m", REPORT, way], env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    wait_for(lambda: forked.poll() is not None, "the end of the forked program")
    assert (forked.poll(), started.returncode) == (code, code)
    assert log.read_text() == started.stdout


ENDS = [
    pytest.param("trainer", exit_codes.USAGE, {"RLRUN_API_KEY": ""}, marks=pytest.mark.full),
    ("orchestrator", exit_codes.USAGE, {"RLRUN_ATTEMPT": ""}),
    pytest.param("inference", exit_codes.DATA, {}, marks=pytest.mark.full),
    ("model", exit_codes.OK, {}),
]


@pytest.mark.parametrize(("role", "code", "variables"), ENDS)
def test_forked_roles_have_output_and_files_of_started_ones(
    role: str, code: int, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for is_forked in (True, False):
        monkeypatch.setattr(StubRun, "is_forked", is_forked)
        with stub_run(tmp_path / f"forked-{is_forked}") as run:
            process = run.start(role, **variables)
            assert isinstance(process, Forked) is is_forked
            assert run.wait(process) == code, run.state()
            files = sorted(str(path.relative_to(run.root)) for path in run.root.rglob("*"))
            results.append((re.sub(r"\d{2}:\d{2}:\d{2}|forked-\w+", "", run.log(role).read_text()), files))
    assert results[0] == results[1]
