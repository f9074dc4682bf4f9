"""SIGTERM in any phase of a step: a quick end with a complete checkpoint of the last finished step, and a bitwise
equal resume.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.trainer.ranks.launch import torchrun_command
from tests.support.programs import finish
from tests.support.waiting import UNREACHED_SECONDS
from tests.trainer.conftest import KEY, SHORT, Orchestrator

STOPPED = 128 + signal.SIGTERM
EXACT = ("loss", "grad_norm", "param_checksum", "skipped_steps")
LAST = 4


@pytest.mark.parametrize(
    ("phase", "step", "ranks", "options", "saved"),
    [
        pytest.param("waiting_for_batch", 4, [1], {}, 3, marks=pytest.mark.full),
        ("training", 4, [0], {}, 3),
        pytest.param("publishing", 3, [0, 1], {}, 3, marks=pytest.mark.full),
        # The write that started in this phase continues during the next step.
        pytest.param("saving", 2, [1], {}, 2, marks=pytest.mark.full),
        pytest.param("saving", 4, [0, 1], {"save_async": False}, 4, marks=pytest.mark.full),
    ],
)
def test_sigterm_in_any_phase_saves_the_last_step(
    make_run: Callable[[str], Any],
    recorded: Path,
    uninterrupted: list[dict[str, float]],
    phase: str,
    step: int,
    ranks: list[int],
    options: dict[str, Any],
    saved: int,
) -> None:
    run = make_run("run")
    checkpoint = options | {"grace_period_seconds": 20}
    group = run.start(
        ranks=2,
        replay=recorded,
        checkpoint=checkpoint,
        sigterm_in=dict.fromkeys(ranks, f"{phase}:{step}"),
        max_steps=LAST,
        **SHORT,
    )
    assert group.wait() == [STOPPED, STOPPED], group.text()
    assert f"stopped by SIGTERM after step {saved}\n" in group.text()
    assert "Traceback" not in group.text()
    assert [line["step"] for line in run.metrics()] == list(range(1, saved + 1))
    assert max(artifact.step for artifact in complete_checkpoints(run.paths)) == saved

    found = run.train(attempt=2, ranks=2, replay=recorded, max_steps=LAST, **SHORT)
    assert read_attempt(run.paths.attempt_file(2)).base_step == saved
    assert [line["step"] for line in found] == list(range(1, LAST + 1))
    for one, other in zip(uninterrupted[:LAST], found, strict=True):
        for metric in EXACT:
            assert other[metric] == one[metric], (one["step"], metric)


@pytest.mark.full
def test_trainer_and_orchestrator_complete_the_final_checkpoint(make_run: Callable[[str], Any]) -> None:
    run = make_run("run")
    file = run.write_config(ranks=2, checkpoint={"grace_period_seconds": UNREACHED_SECONDS})
    config = RunConfig.model_validate_json(file.read_text()).trainer
    command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1)
    environment = {**os.environ, "RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": KEY}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        orchestrator = Orchestrator(run, 1)
        orchestrator.wait_for("published", 0)
        for step in (1, 2, 3):
            orchestrator.step(step)
        process.send_signal(signal.SIGTERM)  # only to torchrun, like a pod or a launcher
        orchestrator.complete_checkpoint(3)
        output, _ = finish(process)
    finally:
        process.kill()
    assert process.returncode == STOPPED, output
    assert "stopped by SIGTERM after step 3\n" in output
    assert [artifact.step for artifact in complete_checkpoints(run.paths)] == [2, 3]


@pytest.mark.full
def test_missing_orchestrator_does_not_delay_the_end(make_run: Callable[[str], Any]) -> None:
    run = make_run("run")
    group = run.start(ranks=1, checkpoint={"grace_period_seconds": UNREACHED_SECONDS})
    orchestrator = Orchestrator(run, 1)
    orchestrator.wait_for("published", 0)
    orchestrator.step(1)
    group.kill(signal.SIGTERM)
    assert group.wait() == [STOPPED], group.text()  # long before the end of the grace period
    assert "stopped by SIGTERM after step 1, without a complete checkpoint of it" in group.text()
    assert complete_checkpoints(run.paths) == []
