"""Optimizers on two ranks: equal to one rank, bitwise equal after a resume, and no update from an infinite gradient."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import read_batch, write_batch
from rlrun.protocol.files.paths import RunPaths

STEPS = 4
POISONED = 3
"""Step in which one sample of one rank has a gradient that overflows."""


@pytest.fixture(scope="module")
def poisoned(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    paths = RunPaths(tmp_path_factory.mktemp("poisoned"))
    for step in range(1, STEPS + 1):
        batch = read_batch(recorded / paths.batch(step, 1).name)
        if step == POISONED:
            first = batch.samples[0]
            batch = replace(batch, samples=(replace(first, advantages=first.loss_mask * 1e38), *batch.samples[1:]))
        write_batch(paths.batch(step, 1), batch)
    return paths.rollouts


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.full) for name in ("muon", "sgd"))])
def test_two_rank_optimizer_matches_one_rank_and_resumes(
    name: str, make_run: Callable[[str], Any], poisoned: Path
) -> None:
    optimizer = OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1)
    options: dict[str, Any] = {"replay": poisoned, "optimizer": optimizer}
    one = make_run("one").train(max_steps=STEPS, **options)
    run = make_run("two")
    two = run.train(max_steps=STEPS, ranks=2, **options)
    for alone, together in zip(one, two, strict=True):
        for metric in ("entropy", "mismatch_kl", *(("loss", "grad_norm") if alone["step"] != POISONED else ())):
            assert together[metric] == pytest.approx(alone[metric], rel=1e-4, abs=1e-5), (alone["step"], metric)
    sums = [line["param_checksum"] for line in two]
    assert [line["skipped_steps"] for line in two] == [0, 0, 1, 1]
    assert sums[POISONED - 1] == sums[POISONED - 2]
    assert len(set(sums)) == STEPS - 1
    shutil.rmtree(run.paths.checkpoint(STEPS, 1))  # like a kill before that checkpoint
    again = run.train(max_steps=STEPS, ranks=2, attempt=2, **options)
    assert [line["attempt"] for line in again] == [1, 1, 2, 2]
    assert [line["param_checksum"] for line in again] == sums
