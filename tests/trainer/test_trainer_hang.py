"""Real group in which one rank hangs in native code: phases of all ranks are visible, and each process prints its
stacks.
"""

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
from rlrun.pod.role_process import descendant_pids
from rlrun.protocol.messages import trainer_channel as protocol
from tests.support.programs import finish, wait_for
from tests.support.python_path import before
from tests.trainer.conftest import Orchestrator
from tests.trainer.test_trainer_live import launch

pytestmark = pytest.mark.full

LOSS = {"name": "hanging_loss:hangs_on_rank_1"}


def test_hanging_ranks_report_phases_and_stacks(
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
        # A rank reports a micro-batch before the ranks agree to continue with it; a signal in between ends them in
        # order.
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
    return stacks.request_stacks([process.pid, *descendant_pids(process.pid)], file, why="it hangs").decode()


def end(process: subprocess.Popen[str]) -> None:
    for pid in [*descendant_pids(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finish(process)
