"""No command line runs a user's code in its own process: whatever it does, a problem names its field and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.program_forks import RLRUN, program_forks
from tests.support.programs import finish, wait_for
from tests.support.python_path import before

FOLDER = Path(__file__).parent / "usercode"
MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: mine}
spec:
  model: {tiny: {}}
  maxSteps: 2
  seqLen: 512
  environments:
  - id: reverse-text
  - {id: "deeds:make", name: mine, args: {deed: DEED}, startTimeoutSeconds: SECONDS}
"""
DEEDS = [
    ("ends", "exited with code 0 while loading"),
    ("exits", "raised SystemExit"),
    ("hangs", "did not load within 4 seconds; it is at"),
    ("computes", "did not load within 4 seconds; it is at"),
    ("stops", "did not load within 4 seconds"),
    ("crashes", "was killed by SIGSEGV"),
    ("floods", "did not load within 4 seconds"),
    ("raises", "make() raised KeyError: 'row 9'"),
    ("cancels", "raised CancelledError"),
    ("interrupts", "raised KeyboardInterrupt"),
    ("kills", "was killed by SIGKILL"),
]

GATE = ("ends", "exits", "hangs", "crashes", "raises")
"""The others differ in what the environment's process does: its tests have each of them (`tests/processes/environments`)."""


def environ(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": before(FOLDER)} | more


def alive(pid: str) -> bool:
    """Whether it runs; a zombie has ended and waits for the machine's first process alone."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return str(file)


def call(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return program_forks().call(RLRUN, *words, environment=environ(**more), folder=cwd)


@pytest.mark.parametrize(
    ("deed", "said"),
    [pytest.param(*deed, marks=[] if deed[0] in GATE else [pytest.mark.full], id=deed[0]) for deed in DEEDS],
)
def test_a_misdeed_while_loading_is_a_problem_with_a_name(tmp_path: Path, deed: str, said: str) -> None:
    seconds = "4" if "4 seconds" in said else "60"
    file = write(tmp_path, MANIFEST.replace("DEED", deed).replace("SECONDS", seconds))
    done = call("validate", file, cwd=tmp_path)
    assert done.returncode == 78, (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{file}:10: spec.environments[1].args: ")
    assert said in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("deed", "said"),
    [pytest.param(*DEEDS[0], id="ends"), pytest.param(*DEEDS[2], id="hangs", marks=pytest.mark.full)],
)
def test_a_local_run_does_not_begin_with_it(tmp_path: Path, deed: str, said: str) -> None:
    file = write(tmp_path, MANIFEST.replace("DEED", deed).replace("SECONDS", "4"))
    done = call("local", file, "--output-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 78, (done.returncode, done.stdout)
    assert "spec.environments[1].args: " in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_it_has_started_ends_with_the_check(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    args = f"deed: forks, note: {note}"
    done = call(
        "validate", write(tmp_path, MANIFEST.replace("deed: DEED", args).replace("SECONDS", "60")), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not alive(note.read_text())


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("validate", signal.SIGINT),
        ("local", signal.SIGTERM),
        pytest.param("validate", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("local", signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_a_check_that_hangs(tmp_path: Path, command: str, number: signal.Signals) -> None:
    note = tmp_path / "hangs"
    file = write(tmp_path, MANIFEST.replace("deed: DEED", f"deed: hangs, note: {note}").replace("SECONDS", "300"))
    with program_forks().open(RLRUN, command, file, environment=environ(), folder=tmp_path) as process:
        wait_for(note.exists, "the check hangs")
        loading = children(process.pid)
        assert loading
        process.send_signal(number)
        _, err = finish(cast("subprocess.Popen[str]", process))
    assert process.returncode == 130, "long before the check's own 300 seconds are over"
    assert "Traceback" not in err
    assert [pid for pid in loading if Path("/proc", str(pid)).exists()] == []


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.parametrize("field", ["algorithm", pytest.param("environments", marks=pytest.mark.full)])
def test_a_loss_of_ones_own_is_looked_at_too(tmp_path: Path, field: str) -> None:
    good = "".join(line for line in MANIFEST.splitlines(keepends=True) if "deeds:make" not in line)

    def judged(loss: str) -> Any:
        if field == "algorithm":
            return call("validate", write(tmp_path, good + f"  algorithm: {{loss: {loss}}}\n"), cwd=tmp_path)
        text = good.replace("- id: reverse-text", f"- {{id: reverse-text, algorithm: {{loss: {loss}}}}}")
        return call("validate", write(tmp_path, text), cwd=tmp_path)

    where = "spec.algorithm.loss.name" if field == "algorithm" else "spec.environments[0].algorithm.loss.name"
    for loss, said in (
        ('{name: "ends_at_import:loss"}', "exited with code 0 while loading"),
        ('{name: "deeds:lss"}', "module deeds has no lss"),
        ('{name: "deeds:loss", options: {sharpnes: 2}}', "sharpnes"),
        ('{name: "deeds:loss"}', "option sharpness must be given"),
    ):
        done = judged(loss)
        assert done.returncode == 78, (loss, done.stdout)
        assert where in done.stderr
        assert said in done.stderr
    assert judged('{name: "deeds:loss", options: {sharpness: 2}}').returncode == 0
    absent = judged('{name: "nowhere_here.losses:loss"}')
    assert (absent.returncode, f"note: {where} is not checked on this machine" in absent.stdout) == (0, True)


def test_an_environment_is_asked_with_its_own_interpreter(tmp_path: Path) -> None:
    """Its packages are there and not here; that of this command line is never asked."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={before(FOLDER)} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    text = MANIFEST.replace("DEED", "good").replace("SECONDS", f"60, python: {python}")
    done = call("validate", write(tmp_path, text), cwd=tmp_path, PYTHONPATH=before())
    assert (done.returncode, "note" in done.stdout) == (0, False), done.stdout + done.stderr
    absent = write(tmp_path, text.replace(str(python), "/opt/venv/bin/python"))
    done = call("validate", absent, cwd=tmp_path, PYTHONPATH=before())
    assert done.returncode == 0, done.stderr
    assert (
        "note: spec.environments[1].id is not checked on this machine: cannot start /opt/venv/bin/python" in done.stdout
    )
    done = call("local", absent, cwd=tmp_path, PYTHONPATH=before())
    assert done.returncode == 78
    assert "spec.environments[1].id: cannot start /opt/venv/bin/python" in done.stderr


def test_an_environment_with_an_image_is_told_to_be_unchecked(tmp_path: Path) -> None:
    text = MANIFEST.replace("DEED", "ends").replace("SECONDS", "60, image: registry/mine:1")
    done = call("validate", write(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "note: spec.environments[1].image (registry/mine:1) is not on this machine, so this environment is not checked"
        in done.stdout
    )


def test_a_warm_up_is_looked_at_before_a_model_is_made(tmp_path: Path) -> None:
    text = MANIFEST.replace("DEED", "good").replace("SECONDS", "60")
    text = text.replace("{tiny: {}}", '{tiny: {warmupEnvironment: "deeds:make", warmupArgs: {deed: ends}}}')
    done = call("validate", write(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 78, done.stdout
    assert "spec.model.tiny.warmupEnvironment: its process exited with code 0" in done.stderr
    words = ("--warmup-environment", "deeds:make", "--warmup-args.deed", "ends")
    done = call("tiny-model", str(tmp_path / "model"), *words, cwd=tmp_path)
    assert done.returncode == 78, done.stdout
    assert "--warmup-environment: its process exited with code 0" in done.stderr


REWARDS = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: mine}
spec:
  model: {tiny: {}}
  maxSteps: 2
  environments:
  - {id: dataset, name: good, args: {path: ROWS, reward: "rewards_of_mine:right"}}
  - {id: dataset, name: missing, args: {path: ROWS, reward: "no_such_rewards:right"}}
  - {id: dataset, name: typo, args: {path: ROWS, reward: "rewards_of_mine:rihgt"}}
  - {id: dataset, name: source, args: {path: ROWS, reward_by_source: {gsm8k: exact}}}
"""


def test_a_mistake_in_a_reward_of_ones_own_is_found_before_a_run(tmp_path: Path) -> None:
    """Each with its field; a module that is missing on this machine may be in the run's image, but a local run has no other."""
    (tmp_path / "rewards_of_mine.py").write_text("def right(completion, row):\n    return completion == row['uid']\n")
    row = '{{"uid": "{0}", "prompt": "{0}?", "ground_truth": "{0}", "data_source": "gsm9k"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row.format(i) for i in range(40)))
    file = write(tmp_path, REWARDS.replace("ROWS", str(tmp_path / "rows.jsonl")))
    path = {"PYTHONPATH": before(tmp_path)}
    done = call("validate", file, cwd=tmp_path, **path)
    assert done.returncode == 78
    said = {line.split(": ", 2)[1]: line for line in done.stderr.splitlines()}
    assert set(said) == {"spec.environments[2].args", "spec.environments[3].args"}
    assert "reward rewards_of_mine:rihgt: module rewards_of_mine has no rihgt" in said["spec.environments[2].args"]
    assert (
        "data_source 'gsm9k' has no reward (did you mean gsm8k?): reward_by_source names 'gsm8k'"
        in said["spec.environments[3].args"]
    )
    (note,) = [line for line in done.stdout.splitlines() if ": note: " in line]
    assert "spec.environments[1].args is not checked on this machine" in note
    done = call("local", file, "--output-dir", str(tmp_path / "run"), cwd=tmp_path, **path)
    assert done.returncode == 78
    assert (
        "spec.environments[1].args: environment 'dataset': reward no_such_rewards:right: cannot import" in done.stderr
    )
