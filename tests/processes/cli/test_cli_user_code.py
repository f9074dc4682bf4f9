"""User code runs in its own process: each failure is a problem with a field, and no process is left."""

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
"""The other deeds differ only in the environment's process, which `tests/processes/environments` covers."""


def make_environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": before(FOLDER)} | more


def is_running(pid: str) -> bool:
    """Return whether a process runs; a zombie has ended and only waits for init."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def write_manifest(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return str(file)


def call_rlrun(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return program_forks().call(RLRUN, *words, environment=make_environment(**more), folder=cwd)


@pytest.mark.parametrize(
    ("deed", "said"),
    [pytest.param(*deed, marks=[] if deed[0] in GATE else [pytest.mark.full], id=deed[0]) for deed in DEEDS],
)
def test_failing_user_code_is_a_problem_with_field(tmp_path: Path, deed: str, said: str) -> None:
    seconds = "4" if "4 seconds" in said else "60"
    file = write_manifest(tmp_path, MANIFEST.replace("DEED", deed).replace("SECONDS", seconds))
    done = call_rlrun("validate", file, cwd=tmp_path)
    assert done.returncode == 78, (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{file}:10: spec.environments[1].args: ")
    assert said in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("deed", "said"),
    [pytest.param(*DEEDS[0], id="ends"), pytest.param(*DEEDS[2], id="hangs", marks=pytest.mark.full)],
)
def test_local_run_refuses_failing_user_code(tmp_path: Path, deed: str, said: str) -> None:
    file = write_manifest(tmp_path, MANIFEST.replace("DEED", deed).replace("SECONDS", "4"))
    done = call_rlrun("local", file, "--output-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 78, (done.returncode, done.stdout)
    assert "spec.environments[1].args: " in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_child_processes_of_user_code_end_with_check(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    args = f"deed: forks, note: {note}"
    done = call_rlrun(
        "validate",
        write_manifest(tmp_path, MANIFEST.replace("deed: DEED", args).replace("SECONDS", "60")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert not is_running(note.read_text())


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("validate", signal.SIGINT),
        ("local", signal.SIGTERM),
        pytest.param("validate", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("local", signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_signal_stops_a_hanging_check(tmp_path: Path, command: str, number: signal.Signals) -> None:
    note = tmp_path / "hangs"
    file = write_manifest(
        tmp_path, MANIFEST.replace("deed: DEED", f"deed: hangs, note: {note}").replace("SECONDS", "300")
    )
    with program_forks().open(RLRUN, command, file, environment=make_environment(), folder=tmp_path) as process:
        wait_for(note.exists, "the check hangs")
        loading = find_children(process.pid)
        assert loading
        process.send_signal(number)
        _, err = finish(cast("subprocess.Popen[str]", process))
    assert process.returncode == 130, "long before the check's own 300 seconds are over"
    assert "Traceback" not in err
    assert [pid for pid in loading if Path("/proc", str(pid)).exists()] == []


def find_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.parametrize("field", ["algorithm", pytest.param("environments", marks=pytest.mark.full)])
def test_custom_loss_is_checked(tmp_path: Path, field: str) -> None:
    good = "".join(line for line in MANIFEST.splitlines(keepends=True) if "deeds:make" not in line)

    def judged(loss: str) -> Any:
        if field == "algorithm":
            return call_rlrun(
                "validate", write_manifest(tmp_path, good + f"  algorithm: {{loss: {loss}}}\n"), cwd=tmp_path
            )
        text = good.replace("- id: reverse-text", f"- {{id: reverse-text, algorithm: {{loss: {loss}}}}}")
        return call_rlrun("validate", write_manifest(tmp_path, text), cwd=tmp_path)

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


def test_environment_is_checked_with_its_own_interpreter(tmp_path: Path) -> None:
    """Its packages exist only there; the interpreter of the command line is not used."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={before(FOLDER)} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    text = MANIFEST.replace("DEED", "good").replace("SECONDS", f"60, python: {python}")
    done = call_rlrun("validate", write_manifest(tmp_path, text), cwd=tmp_path, PYTHONPATH=before())
    assert (done.returncode, "note" in done.stdout) == (0, False), done.stdout + done.stderr
    absent = write_manifest(tmp_path, text.replace(str(python), "/opt/venv/bin/python"))
    done = call_rlrun("validate", absent, cwd=tmp_path, PYTHONPATH=before())
    assert done.returncode == 0, done.stderr
    assert (
        "note: spec.environments[1].id is not checked on this machine: cannot start /opt/venv/bin/python" in done.stdout
    )
    done = call_rlrun("local", absent, cwd=tmp_path, PYTHONPATH=before())
    assert done.returncode == 78
    assert "spec.environments[1].id: cannot start /opt/venv/bin/python" in done.stderr


def test_environment_with_image_is_reported_as_unchecked(tmp_path: Path) -> None:
    text = MANIFEST.replace("DEED", "ends").replace("SECONDS", "60, image: registry/mine:1")
    done = call_rlrun("validate", write_manifest(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "note: spec.environments[1].image (registry/mine:1) is not on this machine, so this environment is not checked"
        in done.stdout
    )


def test_warm_up_environment_is_checked_before_model(tmp_path: Path) -> None:
    text = MANIFEST.replace("DEED", "good").replace("SECONDS", "60")
    text = text.replace("{tiny: {}}", '{tiny: {warmupEnvironment: "deeds:make", warmupArgs: {deed: ends}}}')
    done = call_rlrun("validate", write_manifest(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 78, done.stdout
    assert "spec.model.tiny.warmupEnvironment: its process exited with code 0" in done.stderr
    words = ("--warmup-environment", "deeds:make", "--warmup-args.deed", "ends")
    done = call_rlrun("tiny-model", str(tmp_path / "model"), *words, cwd=tmp_path)
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


def test_mistake_in_custom_reward_is_found_before_run(tmp_path: Path) -> None:
    """Each problem has its field. A module that is missing here may be in the run's image, but a local run has no image."""
    (tmp_path / "rewards_of_mine.py").write_text("def right(completion, row):\n    return completion == row['uid']\n")
    row = '{{"uid": "{0}", "prompt": "{0}?", "ground_truth": "{0}", "data_source": "gsm9k"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row.format(i) for i in range(40)))
    file = write_manifest(tmp_path, REWARDS.replace("ROWS", str(tmp_path / "rows.jsonl")))
    path = {"PYTHONPATH": before(tmp_path)}
    done = call_rlrun("validate", file, cwd=tmp_path, **path)
    assert done.returncode == 78
    said = {line.split(": ", 2)[1]: line for line in done.stderr.splitlines()}
    assert set(said) == {"spec.environments[2].args", "spec.environments[3].args"}
    assert "reward rewards_of_mine:rihgt: module rewards_of_mine has no rihgt" in said["spec.environments[2].args"]
    assert (
        "data_source 'gsm9k' has no reward (did you mean gsm8k?): reward_by_source has 'gsm8k'"
        in said["spec.environments[3].args"]
    )
    (note,) = [line for line in done.stdout.splitlines() if ": note: " in line]
    assert "spec.environments[1].args is not checked on this machine" in note
    done = call_rlrun("local", file, "--output-dir", str(tmp_path / "run"), cwd=tmp_path, **path)
    assert done.returncode == 78
    assert (
        "spec.environments[1].args: environment 'dataset': reward no_such_rewards:right: cannot import" in done.stderr
    )
