"""`rlrun-pod demonstrations`: code of a tiny model's warm-up environment in its own container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlrun.environments.demonstrations import read_demonstrations
from rlrun.runtime import exit_codes
from tests.support.programs import finish, wait_for, wait_for_exit
from tests.support.python_path import before

TASKS = """
import os, signal, time
from pathlib import Path

import rlrun.environments as api

def report():
    Path(os.environ["HOME"], "seen").write_text(repr(dict(os.environ)))
    from rlrun.environments.bundled.small_tasks import ReverseText, ReverseTextArgs
    return ReverseText(ReverseTextArgs(length=3))

def hang():
    Path(os.environ["HOME"], "started").touch()
    while True:
        time.sleep(0.1)
"""


class Container:
    """Init container with the variables of the operator."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.claim = folder / "demonstrations", folder / "claim" / "run"
        self.code = folder / "code"
        for path in (self.folder, self.claim, self.code):
            path.mkdir(parents=True)
        (self.code / "warm_tasks.py").write_text(TASKS)

    def start(self, environment: str, **env: str) -> subprocess.Popen[str]:
        warm = {"warmup_environment": environment, "warmup_steps": 1}
        own = {
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "RLRUN_MODEL_FOLDER": str(self.claim / "model"),
            "RLRUN_WARMUP": json.dumps(warm),
            "RLRUN_POD_NAME": "run-trainer-0",
            "RLRUN_TERMINATION_LOG": str(self.folder.parent / "message"),
            "PYTHONPATH": before(str(self.code)),
        }
        command = [sys.executable, "-m", "rlrun.pod", "demonstrations", str(self.folder)]
        return subprocess.Popen(command, env=os.environ | own | env, stderr=subprocess.PIPE, text=True)

    def run(self, environment: str, **env: str) -> tuple[int, str]:
        process = self.start(environment, **env)
        _, errors = finish(process)
        return process.returncode, errors

    @property
    def file(self) -> Path:
        return self.folder / "demonstrations.json"


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_warmup_environment_writes_demonstrations_with_last_candidate(container: Container) -> None:
    candidates = {"RLRUN_CANDIDATE_000_HF_TOKEN": "first", "RLRUN_CANDIDATE_002_HF_TOKEN": "last"}
    assert container.run("warm_tasks:report", **candidates) == (exit_codes.OK, "")
    assert len(read_demonstrations(container.file)) == 64
    seen = (container.folder / "home" / "seen").read_text()
    assert "'HF_TOKEN': 'last'" in seen
    assert "CANDIDATE" not in seen
    assert "'PYTHONSAFEPATH': '1'" in seen


@pytest.mark.parametrize(("pod", "has_model"), [("run-trainer-1", False), ("run-trainer-0", True)])
def test_other_pods_and_existing_model_run_no_code(container: Container, pod: str, has_model: bool) -> None:
    if has_model:
        (container.claim / "model").mkdir()
    assert container.run("warm_tasks:report", RLRUN_POD_NAME=pod) == (exit_codes.OK, "")
    assert not container.file.exists()
    assert not (container.folder / "home").exists()


def test_unknown_environment_is_the_container_message(container: Container) -> None:
    code, errors = container.run("reverse-txt")
    message = (container.folder.parent / "message").read_text()
    assert code == exit_codes.CONFIGURATION
    assert message.startswith("model.tiny: ")
    assert "did you mean reverse-text" in message
    assert message in errors


def test_signal_ends_hanging_environment_code(container: Container) -> None:
    process = container.start("warm_tasks:hang")
    wait_for((container.folder / "home" / "started").exists, "the code runs")
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process) == 128 + signal.SIGTERM
