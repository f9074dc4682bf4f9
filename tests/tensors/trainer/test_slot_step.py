"""Steps of one run in this process: published and saved weights equal the trained ones, at the scheduled rate."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig, SchedulerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer import trained_run as run_module
from rlrun.trainer.checkpoints.dcp import POLICY, Part
from rlrun.trainer.checkpoints.dcp import load_parts as load_checkpoint
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import bind_objective
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.shared_model import load_policy
from rlrun.trainer.process import Link, SharedObjects
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.trained_run import Run
from rlrun.trainer.weights import hf_writer, publisher
from rlrun.trainer.weights.publisher import Publisher
from tests.support.process_groups import count_groups

STEPS, PEAK = 4, 0.01
RATES = [0.005, 0.01, 0.005, 0.0]
"""Rates of a warm-up of two steps and a linear decay to 0 at the last step."""


class Bench:
    """Slot that trains on recorded batches and records every update of its optimizer."""

    def __init__(self, root: Path, source: Path, group: Group, make_batch: Callable[..., Batch]) -> None:
        self.config = TrainerConfig(
            name="test",
            uid="uid",
            output_dir=str(root),
            model=ModelConfig(path=str(source), dtype="float32"),
            max_steps=STEPS,
            seq_len=32,
            seed=0,
            algorithm=AlgorithmConfig(),
            optimizer=OptimizerConfig(name="sgd", lr=PEAK, momentum=0.0, max_grad_norm=None),
            scheduler=SchedulerConfig(name="linear", warmup_steps=2),
            checkpoint=CheckpointConfig(interval=2, save_async=False),
        )
        self.paths, self.updates = RunPaths(root), list[dict[str, Tensor]]()
        attempt = first_attempt(world_size=1, config_hash="h")
        write_attempt(self.paths, attempt)
        self.policy = load_policy(self.config, str(source), group, with_weights=True, check=check_model)
        self.slot = Run(
            self.config,
            attempt,
            bind_objective(self.config),
            SharedObjects(self.policy, lambda: None, lambda *_: None),
            Link(replay=True),
            output_dir=root,
        )
        for step in range(1, STEPS + 1):
            write_batch(self.paths.batch(step, 1), make_batch([9, 4, 13], step=step))

    def parameters(self) -> dict[str, Tensor]:
        return {name: local_part(p.detach()).clone() for name, p in self.policy.module.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        named = self.policy.module.named_parameters()
        return {name: local_part(p.grad).clone() for name, p in named if p.grad is not None}

    def step(self, number: int) -> None:
        self.slot.step(self.paths.batch(number, 1))

    def published(self, step: int) -> dict[str, Tensor]:
        files = sorted(self.paths.version(step, 1).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def bench(tmp_path: Path, source: Path, solo: Group, make_batch: Callable[..., Batch]) -> Iterator[Bench]:
    made = Bench(tmp_path / "run", source, solo, make_batch)
    hook = register_optimizer_step_pre_hook(lambda *_: made.updates.append(made.gradients()))
    yield made
    hook.remove()
    made.slot.close(wait=True)


def test_published_version_equals_trained_weights(bench: Bench) -> None:
    bench.slot.publish_base()
    values = [bench.parameters()]
    for step in range(1, STEPS):
        bench.step(step)
        values.append(bench.parameters())
    for step, expected in enumerate(values):
        if not bench.paths.version(step, 1).exists():  # deleted by retention
            continue
        found = bench.published(step)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), step
    assert bench.paths.version(STEPS - 1, 1).exists()
    for one, next_one in pairwise(values):
        assert any(not torch.equal(one[name], next_one[name]) for name in one)


def test_step_moves_weights_by_scheduled_rate(bench: Bench) -> None:
    for step, rate in enumerate(RATES, start=1):
        before = bench.parameters()
        bench.updates.clear()
        bench.step(step)
        gradient, after = bench.updates[0], bench.parameters()  # saving makes updates of 0 to create optimizer state
        assert any(value.abs().max() > 0 for value in gradient.values())
        for name, value in after.items():
            torch.testing.assert_close(value, before[name] - rate * gradient[name], atol=1e-7, rtol=1e-6)


def test_saved_checkpoint_equals_trained_weights(
    bench: Bench, source: Path, solo: Group, make_model: Callable[..., nn.Module]
) -> None:
    for step in (1, 2):
        bench.step(step)
    expected: dict[str, Any] = bench.parameters()
    policy = load_policy(bench.config, str(source), solo, with_weights=True, check=check_model)
    part = Part(policy.module, make_optimizer(policy.module, bench.config.optimizer, solo.device))
    assert load_checkpoint({POLICY: part}, bench.paths.checkpoint(2, 1)).step == 2
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(local_part(parameter), expected[name]), name


def test_step_waits_until_volume_accepts_its_version(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    save, tries = hf_writer.save_file, list[str]()

    def refused_twice(tensors: Any, path: Any, **options: Any) -> None:
        tries.append(str(path))
        if len(tries) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, **options)

    monkeypatch.setattr(hf_writer, "save_file", refused_twice)
    monkeypatch.setattr(publisher, "retry_pauses", lambda: repeat(0.0))
    for step in (1, 2):
        bench.step(step)
    assert len(tries) > 2
    assert all(torch.equal(bench.published(2)[name], value) for name, value in bench.parameters().items())


def test_failed_run_start_leaves_no_thread_or_group(
    source: Path, tmp_path: Path, solo: Group, make_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> Publisher:
        raise RoleError("no room")

    monkeypatch.setattr(run_module, "Publisher", broken)
    threads, groups = set(threading.enumerate()), count_groups()
    with pytest.raises(RoleError, match="no room"):
        Bench(tmp_path / "run", source, solo, make_batch)
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive(), thread.name
    assert count_groups() == groups
