"""A killed trainer with routed batches and moving biases: the next attempt gives the same bits, and two ranks the same biases."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.config.models.parallel import RouterConfig
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages import trainer_channel as protocol
from tests.support import routed_models
from tests.support.balanced_models import exported_biases, read_biases
from tests.trainer.conftest import Orchestrator

LAST = 4
EXACT = ("loss", "grad_norm", "param_checksum", "routing/replayed_share", "routing/changed_share", "routing/aux_loss")


class RoutedOrchestrator(Orchestrator):
    """Orchestrator that sends given batches."""

    batches: dict[int, Batch]

    def send_batch(self, step: int) -> None:
        path = self.run.paths.batch(step, self.attempt)
        write_batch(path, replace(self.batches[step], attempt=self.attempt))
        self.call("POST", protocol.BATCHES, {"step": step, "path": str(path)})


def start_orchestrator(run: Any, attempt: int, batches: dict[int, Batch]) -> RoutedOrchestrator:
    orchestrator = RoutedOrchestrator(run, attempt)
    orchestrator.batches = batches
    return orchestrator


ROUTER = RouterConfig(replay="Rollout", bias="Update", bias_rate=0.01, aux_loss=0.01)


def test_killed_run_with_routes_resumes_bit_for_bit(make_run: Callable[[str], Any], tmp_path: Path) -> None:
    source = routed_models.save_model(tmp_path / "source", "glm4_moe")
    batches = {step: routed_models.make_batch(source, step=step) for step in range(1, LAST + 1)}
    recorded = RunPaths(tmp_path / "recorded")
    for step, batch in batches.items():
        write_batch(recorded.batch(step, 1), batch)
    options: dict[str, Any] = {"model": source, "max_steps": LAST, "router": ROUTER}
    whole = make_run("uninterrupted")
    expected = whole.train(replay=recorded.rollouts, **options)

    run = make_run("killed")
    first = run.start(attempt=1, **options)
    orchestrator = start_orchestrator(run, 1, batches)
    orchestrator.wait_for("published", 0)
    found = {step: orchestrator.step(step) for step in (1, 2, 3)}
    first.kill(signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]

    second = run.start(attempt=2, **options)
    orchestrator = start_orchestrator(run, 2, batches)
    orchestrator.wait_for("published", 2)
    assert orchestrator.call("GET", "/rlrun/trainer/state")["base_step"] == 2
    found |= {step: orchestrator.step(step) for step in (3, 4)}
    orchestrator.wait_for("finished", LAST)
    orchestrator.call("POST", "/rlrun/trainer/shutdown", {})
    assert second.wait() == [0], second.text()

    for line in expected:
        for metric in EXACT:
            assert found[line["step"]][metric] == line[metric], (line["step"], metric)
    tokens = sum(routed_models.LENGTHS)
    share = (tokens - len(routed_models.LENGTHS)) / tokens
    assert all(line["routing/replayed_share"] == pytest.approx(share) for line in found.values())
    assert all(line["routing/changed_share"] > 0 for line in found.values())

    biases = {name: read_biases(path) for name, path in (("source", source), ("end", run.paths.version(LAST, 2)))}
    assert biases["end"]
    moved = max(float((biases["end"][name] - tensor).abs().max()) for name, tensor in biases["source"].items())
    assert moved == pytest.approx(LAST * ROUTER.bias_rate, rel=1e-3)
    two = make_run("two ranks")
    two.train(ranks=2, replay=recorded.rollouts, **options)
    for other in (whole, two):  # a replay publishes no versions
        found_biases = exported_biases(other.paths.checkpoint(LAST, 1), source, step=LAST)
        assert found_biases.keys() == biases["end"].keys()
        for name, tensor in found_biases.items():
            assert torch.equal(tensor, biases["end"][name]), (other.paths.root, name)
