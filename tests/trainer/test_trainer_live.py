"""A group as users and the launcher see it: one clear line, the right exit code and a quick end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import write_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.launch import torchrun_command
from tests.support.programs import finish
from tests.support.waiting import UNREACHED_SECONDS
from tests.trainer.conftest import KEY, Orchestrator, make_batch

pytestmark = pytest.mark.full


def launch(run: Any, *, ranks: int, **options: Any) -> subprocess.Popen[str]:
    """Start a group like the launcher."""
    file = run.write_config(ranks=ranks, **options)
    config = RunConfig.model_validate_json(file.read_text()).trainer
    command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1)
    environment = {**os.environ, "RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": KEY}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_model_without_weights_ends_torchrun_with_one_line(make_run: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run = make_run("run")
    process = launch(run, ranks=1, model=folder)
    output, _ = finish(process)
    assert process.returncode == exit_codes.DATA, output
    assert "has no weights" in output.strip().splitlines()[-1]
    assert "Traceback" not in output
    error = json.loads((run.paths.logs(1, "trainer") / "error.json").read_text())
    assert error["exit_code"] == exit_codes.DATA
    assert str(folder) in error["message"]


def test_sigterm_ends_torchrun_and_its_ranks_immediately(make_run: Callable[[str], Any]) -> None:
    run = make_run("run")
    process = launch(run, ranks=2, checkpoint={"grace_period_seconds": UNREACHED_SECONDS})
    Orchestrator(run, 1).wait_for("published", 0)  # both ranks now wait for a batch, one of them inside a collective
    process.send_signal(signal.SIGTERM)
    output, _ = finish(process)  # long before the end of the grace period
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output


def test_wrong_batches_and_keys_are_refused(make_run: Callable[[str], Any]) -> None:
    run = make_run("run")
    group = run.start(ranks=2)
    orchestrator = Orchestrator(run, 1)
    orchestrator.wait_for("published", 0)
    with pytest.raises(HTTPError, match="401"):
        orchestrator.call("GET", "/rlrun/trainer/state", key="wrong")
    elsewhere = RunPaths(run.paths.root / "elsewhere").batch(1, 1)
    with pytest.raises(HTTPError, match="409"):
        orchestrator.call("POST", "/rlrun/trainer/batches", {"step": 1, "path": str(elsewhere)})
    path = run.paths.batch(1, 1)
    write_batch(path, make_batch(2, 1))
    orchestrator.call("POST", "/rlrun/trainer/batches", {"step": 1, "path": str(path)})
    assert exit_codes.DATA in group.wait()
    assert f"the batch {path} is refused: it is for step 2, the next step is 1" in group.text()
    assert "Traceback" not in group.text()
