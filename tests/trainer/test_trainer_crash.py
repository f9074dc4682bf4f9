"""Rank that is ended by a signal: the error reports its own last frames, not the lost connections of its peers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.failures import ROLE_ENVIRONMENT, read_error
from rlrun.trainer.ranks.launch import torchrun_command
from tests.support.programs import run_program
from tests.support.python_path import before
from tests.trainer.conftest import KEY

pytestmark = pytest.mark.full

CRASHES = AlgorithmConfig.model_validate({"loss": {"name": "crashing_loss:crashes_on_rank_1"}})
SEGMENTATION_FAULT = 139


def test_crashed_rank_is_reported_with_its_last_frames(
    make_run: Callable[[str], Any], recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parent))
    run = make_run("run")
    file = run.write_config(ranks=2, algorithm=CRASHES, micro_batch_tokens=32)
    config = RunConfig.model_validate_json(file.read_text()).trainer
    command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1, replay=recorded)
    environment = {**os.environ, **ROLE_ENVIRONMENT, "RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": KEY}
    done = run_program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert done.returncode == SEGMENTATION_FAULT, done.stdout
    told = read_error(run.paths.logs(1, "trainer"))
    assert told is not None
    first, crash, thread, latest, caller, *_ = str(told).splitlines()
    assert first == "rank 1 was ended by SIGSEGV; its last lines:"
    assert crash == "Fatal Python error: Segmentation fault"
    assert thread.startswith("Current thread")
    assert "in string_at" in latest
    assert "in crashes_on_rank_1" in caller
    assert (told.code, told.follows) == (SEGMENTATION_FAULT, False)
    assert f"trainer: {told}\n" in done.stdout, "the log has it in one piece"
    assert f"trainer: crash dump of rank 1:\n{crash}\n" in done.stdout, "and all that the rank wrote"
