"""Restored state of the trainer's checkpoint part."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.batch_step import seed_step
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.train_step import parameter_checksum, train_step
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.support.sets import few_in_gate

OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "adamw", "moments": "int8"},
    {"name": "muon"},
    {"name": "sgd"},
]


@pytest.mark.parametrize(
    ("unused", "options"),
    few_in_gate(product((False, True), OPTIMIZERS), [*product([False], OPTIMIZERS), (True, OPTIMIZERS[0])]),
    ids=str,
)
def test_restored_training_continues_bit_for_bit(
    unused: bool,
    options: dict[str, Any],
    tmp_path: Path,
    solo: Group,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[..., Batch],
) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        whole = make_model()
        if unused:  # a module that text inputs do not use
            torch.manual_seed(5)
            whole.vision = nn.Linear(4, 4)
        model = shard_model(whole, solo)
        return model, make_optimizer(model, OptimizerConfig(**options, weight_decay=0.1), solo.device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        sums = []
        for step in steps:
            batch = make_batch([5 + step, 9])
            train_step(
                model,
                optimizer,
                Update(batch, [(0, 1)]),
                group=solo,
                loss=Mixture(Objective("aipo")),
                lr=0.01 / step,
                max_grad_norm=1.0,
            )
            sums.append(parameter_checksum(model))
        return sums

    model, optimizer = fresh()
    train(model, optimizer, range(1, 3))
    Saver({POLICY: Part(model, optimizer)}, solo, background=False).save(Progress(2, 1), tmp_path / "step")
    uninterrupted = train(model, optimizer, range(3, 6))
    again, other = fresh()
    assert dcp.load_parts({POLICY: Part(again, other)}, tmp_path / "step") == Progress(2, 1)
    assert train(again, other, range(3, 6)) == uninterrupted


def test_checkpoint_of_another_model_is_refused(
    tmp_path: Path, solo: Group, make_model: Callable[..., nn.Module]
) -> None:
    def part_of(family: str) -> Part:
        model = shard_model(make_model(family), solo)
        return Part(model, make_optimizer(model, OptimizerConfig(), solo.device))

    Saver({POLICY: part_of("llama")}, solo, background=False).save(Progress(1), tmp_path / "step")
    with pytest.raises(RoleError, match=r"another model: model\.layers\.0\..* is missing in the checkpoint") as refused:
        dcp.load_parts({POLICY: part_of("qwen3")}, tmp_path / "step")
    assert refused.value.code == exit_codes.DATA


def test_random_numbers_of_step_depend_on_seed_and_step() -> None:
    drawn = []
    for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1)):
        seed_step(seed, step)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3
