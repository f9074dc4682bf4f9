"""Steps of a live run of two ranks, replayed by two ranks, and a fork that continues like the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.cli.replay_runs import run_fork, run_replay
from rlrun.config.models.roles import TrainerConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import read_fork
from rlrun.replay import step_replay
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.launch import Job
from tests.trainer.conftest import STEPS, Group, Orchestrator, Run, make_batch

pytestmark = pytest.mark.full

EXACT = ("loss", "grad_norm", "entropy", "param_checksum")


@pytest.fixture
def live(make_run: Callable[[str], Run]) -> Run:
    """Run six steps with two ranks and an orchestrator, and write metrics like an orchestrator."""
    run = make_run("live")
    group = run.start(attempt=1, ranks=2, name="live")
    orchestrator = Orchestrator(run, 1)
    orchestrator.wait_for("published", 0)
    lines = [{"step": step, "attempt": 1} | orchestrator.step(step) for step in range(1, STEPS + 1)]
    orchestrator.wait_for("finished", STEPS)
    orchestrator.call("POST", "/rlrun/trainer/shutdown", {})
    assert group.wait() == [0, 0], group.text()
    run.paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def ranks(live: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fork the ranks of a replay like those of a run, because their imports take seconds."""

    def start(config: TrainerConfig, file: Path, job: Job) -> None:
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(config.world_size),
            "RLRUN_ATTEMPT": "1",
        }
        log = tmp_path / "replay.log"
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(config.world_size)]
        words = ["--config", str(file), *job.rank_arguments()]
        group = Group([live.zygote.start(shared | place, words, log) for place in places], log, live.zygote)
        assert group.wait() == [0] * config.world_size, group.text()

    monkeypatch.setattr(step_replay, "run_ranks", start)


def content(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("ranks")
def test_replayed_steps_are_equal_and_fork_continues(
    live: Run, make_run: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(live.paths.root)
    root = str(live.paths.root)

    assert run_replay([root, "--step", "5", "--sample", "0", "-o", "json"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["startStep"], found["where"]) == (True, 4, "2 ranks on cpu")
    assert {row["verdict"] for row in found["quantities"]} == {"equal"}
    assert len(found["sample"]["objective"]["positions"]) == int(make_batch(5, 1).samples[0].loss_mask.sum())
    assert run_replay([root, "--step", "6", "--ranks", "1"]) == exit_codes.OK
    said = capsys.readouterr().out
    assert "bits may differ: the run had 2 ranks and this replay 1" in said
    assert "step 6 is the same within 0.001" in said

    manifest = tmp_path / "run.yaml"
    manifest.write_text(yaml.safe_dump(described(live)))
    folder = tmp_path / "forked"
    words = [root, "--manifest", str(manifest), "--folder", str(folder)]
    assert run_fork([*words, "--step", "4"]) == exit_codes.OK
    assert "live-4 starts from step 4 of live" in (said := capsys.readouterr().out)
    assert "no changes" in said
    assert content(live.paths.root) == before

    forked = make_run("forked")
    assert forked.paths == RunPaths(folder)
    assert [line["step"] for line in forked.metrics()] == [1, 2, 3, 4]
    goes_on(live, forked)


def goes_on(live: Run, forked: Run) -> None:
    """Train the fork on the batches of the run and compare the metrics."""
    group = forked.start(attempt=2, ranks=2, name="live-4")
    orchestrator = Orchestrator(forked, 2)
    orchestrator.wait_for("published", 4)
    found = [orchestrator.step(step) for step in (5, 6)]
    orchestrator.wait_for("finished", STEPS)
    orchestrator.call("POST", "/rlrun/trainer/shutdown", {})
    assert group.wait() == [0, 0], group.text()
    for line, own in zip(live.metrics()[4:], found, strict=True):
        assert {name: own[name] for name in EXACT} == {name: line[name] for name in EXACT}
    attempt = read_attempt(forked.paths.attempt_file(2))
    assert (attempt.base_step, attempt.base_attempt) == (4, 1)
    origin = read_fork(forked.paths.fork)
    assert origin is not None
    assert (origin.run, origin.uid, origin.step, origin.changed) == ("live", "uid", 4, ())


def described(run: Run) -> dict[str, Any]:
    """Return a manifest of the run."""
    return {
        "apiVersion": "rlrun.io/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": "live"},
        "spec": {
            "model": {"path": str(run.model), "dtype": "float32"},
            "maxSteps": STEPS,
            "seqLen": 32,
            "environments": [{"id": "reverse-text"}],
            "sampling": {"maxTokens": 8},
            "trainer": {"processesPerReplica": 2, "microBatchTokens": 64, "optimizer": {"lr": 1e-3}},
            "checkpoint": {"interval": 2, "keepLast": 10},
        },
    }
