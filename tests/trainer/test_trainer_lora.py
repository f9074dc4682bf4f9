"""Adapters in a group of ranks: equal training on one and two ranks, and equal bits after a kill."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from rlrun.config.models.language_models import LoRAConfig
from tests.trainer.conftest import Orchestrator

pytestmark = pytest.mark.full

STEPS = 4
FEW = 3
"""Number of steps for which every version is kept."""
LORA = LoRAConfig(rank=4, alpha=8, targets=["q_proj", "o_proj", "mlp.*"])
EXACT = ("loss", "grad_norm", "entropy", "param_checksum")


def adapter(run: Any, version: int) -> dict[str, torch.Tensor]:
    return load_file(run.paths.version(version, 1) / "adapter_model.safetensors")


def test_two_ranks_train_the_same_adapter_as_one(make_run: Callable[[str], Any], recorded: Path) -> None:
    one, two = make_run("one"), make_run("two")
    expected = one.train(ranks=1, replay=recorded, max_steps=FEW, lora=LORA)
    found = two.train(ranks=2, replay=recorded, max_steps=FEW, lora=LORA)
    assert expected[-1]["param_checksum"] != expected[0]["param_checksum"]
    for mine, other in zip(expected, found, strict=True):
        for metric in ("loss", "grad_norm", "entropy", "mismatch_kl"):
            assert other[metric] == pytest.approx(mine[metric], rel=1e-5, abs=1e-5), (mine["step"], metric)
    start, end = adapter(one, 0), adapter(one, FEW)
    assert all(torch.equal(tensor, start[name]) for name, tensor in adapter(two, 0).items())
    assert all(not tensor.any() for name, tensor in start.items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in end.items())
    for name, tensor in adapter(two, FEW).items():
        torch.testing.assert_close(tensor, end[name], atol=1e-5, rtol=1e-5)


def test_killed_adapter_run_resumes_bit_for_bit(make_run: Callable[[str], Any], recorded: Path) -> None:
    uninterrupted = make_run("uninterrupted").train(ranks=2, replay=recorded, max_steps=STEPS, lora=LORA)
    run = make_run("killed")
    first = run.start(attempt=1, ranks=2, max_steps=STEPS, lora=LORA)
    orchestrator = Orchestrator(run, 1)
    orchestrator.wait_for("published", 0)
    found = {step: orchestrator.step(step) for step in (1, 2, 3)}
    first.kill(signal.SIGKILL)
    first.wait()
    second = run.start(attempt=2, ranks=2, max_steps=STEPS, lora=LORA)
    orchestrator = Orchestrator(run, 2)
    orchestrator.wait_for("published", 2)
    found |= {step: orchestrator.step(step) for step in (3, 4)}
    orchestrator.wait_for("finished", STEPS)
    orchestrator.call("POST", "/rlrun/trainer/shutdown", {})
    assert second.wait() == [0, 0], second.text()
    for line in uninterrupted:
        for metric in EXACT:
            assert found[line["step"]][metric] == line[metric], (line["step"], metric)

    saved = FileSystemReader(run.paths.checkpoint(STEPS, 2) / "trainer").read_metadata().state_dict_metadata
    parameters = [name for name in saved if name.startswith("policy.model.")]
    assert parameters
    assert all(name.endswith(("lora_A", "lora_B")) for name in parameters), "the model's own weights are not saved"


def test_unknown_lora_target_is_refused_before_training(make_run: Callable[[str], Any], recorded: Path) -> None:
    run = make_run("wrong")
    group = run.start(replay=recorded, lora=LoRAConfig(targets=["q_porj"]))
    assert group.wait() == [78]
    assert "lora.targets: 'q_porj' matches no" in group.text()
    assert "Traceback" not in group.text()
