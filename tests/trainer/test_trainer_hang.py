"""A real group of which one rank hangs in native code: what every rank does is known from outside, and each process tells where it is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.learning import AlgorithmConfig
from rlrun.diagnostics import stacks
from rlrun.pod.role_process import descendants
from rlrun.protocol.messages import trainer_channel as protocol
from tests.support.programs import finish, wait_for
from tests.support.python_path import before
from tests.trainer.conftest import Orchestrator
from tests.trainer.test_trainer_live import launch

pytestmark = pytest.mark.full

LOSS = {"name": "hanging_loss:hangs_on_rank_1"}


def test_ranks_that_hang_have_said_what_they_do_and_tell_where_they_are(
    make_run: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stacks"
    monkeypatch.setenv(stacks.FILE_VARIABLE, str(file))
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parent))
    run = make_run("run")
    process = launch(run, ranks=2, algorithm=AlgorithmConfig.model_validate({"loss": LOSS}), micro_batch_tokens=32)
    try:
        orchestrator = Orchestrator(run, 1)
        orchestrator.wait_for("published", 0)
        orchestrator.send_batch(1)
        wait_for(
            lambda: [(r.rank, r.phase, r.step, r.part) for r in ranks(orchestrator)] == [(1, "training", 1, 1)],
            state=lambda: (orchestrator.call("GET", protocol.STATE), ask(process, file)),
        )
        # A micro-batch is told before the ranks agree to go on with it: a signal that comes in between ends them in order.
        wait_for(lambda: "in hangs_on_rank_1" in ask(process, file))
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "in _shutdown" in ask(process, file))
        told = ask(process, file)
    finally:
        end(process)
    agent, first, second = told.split("== process ")[1:]
    assert "rlrun.trainer.ranks.torchrun" in agent
    assert "in _shutdown" in agent
    assert "in train_step" in first
    assert "in hangs_on_rank_1" in second


def ranks(orchestrator: Orchestrator) -> list[protocol.RankState]:
    return protocol.TrainerState.model_validate(orchestrator.call("GET", protocol.STATE)).ranks


def ask(process: subprocess.Popen[str], file: Path) -> str:
    return stacks.request_stacks([process.pid, *descendants(process.pid)], file, why="it hangs").decode()


def end(process: subprocess.Popen[str]) -> None:
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finish(process)
