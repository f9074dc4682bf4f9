"""CPU time of each `rlrun` command on a run of real size: 2,000 steps with 80 metrics each, and a step of 4,000 rollouts.

Each try also measures a reference, a program that imports a few libraries: a busy or slow machine slows both. Limits are multiples of the
reference, two to four times the usual value, and the best try counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlrun.cli.main import COMMANDS
from rlrun.protocol.files.launcher_record import new_record, write_record
from rlrun.protocol.files.paths import RunPaths
from tests.support.forks import Forks
from tests.support.program_forks import CODE, RLRUN
from tests.support.programs import run_program

STEPS, METRICS, ROLLOUTS = 2000, 80, 4096
TRIES = 5
REFERENCE = [sys.executable, "-c", "import asyncio, json, pydantic"]
MOST = 5.0
"""CPU time of a command without the imports that all commands share, as a multiple of the reference."""
MOST_OF_READERS = dict.fromkeys(("debug", "compare", "plot"), 10.0)
"""Commands that read all steps, or all rollouts of a step."""
MOST_OF_HELP = 3.5
MEASURED = """
import resource, sys
from rlrun.cli.main import main
file, *words = sys.argv[1:]
code = main(words)
used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
open(file, "w").write(str(sum(one.ru_utime + one.ru_stime for one in used)))
sys.exit(code)
"""
RUN = "RUN"
"""Placeholder for the folder of the run."""
TIMED: dict[str, tuple[list[str], int]] = {
    "get": ([RUN], 0),
    "status": ([RUN], 0),
    "why": ([RUN], 0),
    "watch": ([RUN], 0),
    "logs": ([RUN], 0),
    "rollouts": ([RUN, "--step", "7", "--worst", "5"], 0),
    "debug": ([RUN, "--file", "bundle.tar.gz"], 0),
    "compare": ([RUN, RUN], 0),
    "cost": ([RUN, "-o", "wide"], 0),
    "plot": ([RUN, "--svg", "curve.svg"], 0),
    "pull": ([RUN, "metrics", "--to", "copy"], 64),
    "put": (["run.yaml", RUN], 64),
    "suspend": ([RUN], 64),
    "resume": ([RUN], 64),
    "restart": ([RUN], 0),
    "scale": ([RUN, "--inference", "2"], 64),
    "set": ([RUN, "maxSteps=5"], 64),
    "completion": (["bash"], 0),
    "version": ([], 0),
    "charts": ([], 0),
    "env": (["list"], 0),
}
"""Arguments of a command, and its exit code for a complete run on this machine."""
_MANIFEST = "reads a manifest by the whole model of the resource, which takes most of a second"
_WORKS = "works for minutes, or until it is stopped"
NOT_TIMED = {
    **dict.fromkeys(("init", "validate", "render", "convert", "fit", "crd", "fork"), _MANIFEST),
    **dict.fromkeys(("local", "rl", "sft", "trainer", "orchestrator", "inference", "eval", "synthesize"), _WORKS),
    **dict.fromkeys(("export", "mirror", "track", "tiny-model", "rows", "ui", "ui-team"), _WORKS),
    "replay": "computes a step again by the trainer",
    "doctor": "imports torch to try it",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of real size."""
    paths = RunPaths(tmp_path_factory.mktemp("runs") / "big")
    for folder in (paths.attempts, paths.traces, paths.root / "logs" / "attempt_0001" / "orchestrator"):
        folder.mkdir(parents=True)
    began = 1_700_000_000.0
    paths.run_json.write_text(json.dumps({"trainer": {"name": "big", "max_steps": STEPS}}))
    paths.attempt_file(1).write_text(json.dumps({"attempt": 1, "started_at": began}))
    more = {f"environment/of/many/{i}": i / 7 for i in range(METRICS)} | {"time/step": 9.5, "time/wait_for_batch": 2.5}
    more |= {"reward/mean": 0.4, "batch/tokens": 3e5, "batch/samples": 256.0, "perf/throughput": 3e4}
    with paths.metrics.open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, "attempt": 1, "time": began + 10 * step} | more) + "\n")
    rollout = {"step": 7, "attempt": 1, "environment": "e", "task_id": "t", "completion": "x" * 2000, "metrics": {}}
    messages = [{"role": "user", "content": "y" * 500}, {"role": "assistant", "content": "x" * 2000}]
    with (paths.traces / "step_00000007.jsonl").open("w") as file:
        for i in range(ROLLOUTS):
            own = {"group": i // 8, "rollout": i % 8, "reward": i / ROLLOUTS, "advantage": 0.0, "messages": messages}
            file.write(json.dumps(rollout | own) + "\n")
    log = "".join(f"06:13:27 | INFO    | trainer | step {step}\n" for step in range(STEPS))
    (paths.root / "logs" / "attempt_0001" / "orchestrator" / "orchestrator.log").write_text(log)
    record = new_record("big", 1, "rlrun local run.yaml --output-dir runs/big --resume", {"trainer": 2, "inference": 6})
    write_record(paths.launcher, replace(record, state="Complete", began=began, time=began + 10 * STEPS))
    return paths.root


def cpu_seconds(command: list[str], folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a program to its end; return the CPU time of all its processes, and its result."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HOME": str(folder)}
    done = run_program(command, cwd=folder, stdin=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def clear_folder(folder: Path) -> None:
    for left in folder.iterdir():
        left.unlink()


def check_result(done: subprocess.CompletedProcess[str], code: int) -> None:
    """Check the result of a command."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "None" not in done.stdout, "what is not known has no word"


def multiple_of_reference(words: list[str], folder: Path) -> float:
    """Return the CPU time of `rlrun WORDS` in multiples of the reference: the best of several tries."""
    best = float("inf")
    for _ in range(TRIES):
        reference, _ = cpu_seconds(REFERENCE, folder)
        used, done = cpu_seconds([sys.executable, "-m", RLRUN, *words], folder)
        check_result(done, 0)
        best = min(best, used / reference)
        if best <= MOST_OF_HELP:
            break
    return best


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Process with the shared imports of all run commands; a command imports the rest."""
    forks = Forks([RLRUN, "rlrun.cli.run_options"], {})
    yield forks
    forks.close()


def test_each_command_has_a_row() -> None:
    assert {*TIMED} | {*NOT_TIMED} == {*COMMANDS}
    assert not {*TIMED} & {*NOT_TIMED}


@pytest.mark.parametrize("command", TIMED)
def test_command_uses_little_cpu(command: str, run: Path, tmp_path: Path, forks: Forks) -> None:
    words, code = TIMED[command]
    line = [command, *(str(run) if word == RUN else word for word in words)]
    used_file, folder = tmp_path / "used", tmp_path / "folder"
    folder.mkdir()
    variables = {**os.environ, "HOME": str(folder)}
    best, most = float("inf"), MOST_OF_READERS.get(command, MOST)
    for _ in range(TRIES):
        clear_folder(folder)
        check_result(forks.call(CODE, MEASURED, str(used_file), *line, environment=variables, folder=folder), code)
        best = min(best, float(used_file.read_text()) / cpu_seconds(REFERENCE, folder)[0])
        if best <= most:
            break
    assert best <= most


def test_help_uses_little_cpu(tmp_path: Path) -> None:
    assert multiple_of_reference(["--help"], tmp_path) <= MOST_OF_HELP
