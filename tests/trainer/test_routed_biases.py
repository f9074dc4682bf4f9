"""Correction biases over ranks: they move by the load of all ranks together, not by the load of one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlrun.config.models.parallel import ParallelismConfig, RouterConfig
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from tests.support import routed_models
from tests.support.balanced_models import exported_biases, read_biases
from tests.support.routed_models import ROW_TOKENS
from tests.support.sets import few_in_gate

RANKS = 2
TOKENS = 24
"""Tokens of a sample."""
LOADS = ((12, 0, 12, 4, 8, 0, 12, 0), (0, 12, 4, 12, 0, 8, 12, 0))
"""Tokens of each expert in the samples. The signs of mean - load are -+-+-+-+ and +-+-+--+, together 00--++-+."""
DIRECTIONS = (0, 0, -1, -1, 1, 1, -1, 1)
RATE = 0.01


def make_routes(load: Sequence[int]) -> NDArray[np.uint8]:
    """Build routes of two experts per token in one layer, `[TOKENS, 1, 2]`, that give each expert its load."""
    experts = np.repeat(np.arange(len(load), dtype=np.uint8), load)
    return np.ascontiguousarray(experts.reshape(2, TOKENS).T[:, None])


def make_batch() -> Batch:
    samples = [routed_models.make_sample(TOKENS, seed) for seed in range(len(LOADS))]
    return Batch(
        1,
        1,
        tuple(dataclasses.replace(one, routes=make_routes(load)) for one, load in zip(samples, LOADS, strict=True)),
    )


@pytest.mark.parametrize("field", few_in_gate(("dp_shard", "dp_replicate", "cp", "ep", "tp", "pp"), ("dp_shard",)))
def test_biases_move_by_the_load_of_all_ranks(field: str, make_run: Callable[[str], Any], tmp_path: Path) -> None:
    planned = plan_micro_batches([TOKENS] * len(LOADS), row_tokens=ROW_TOKENS, ranks=RANKS).ranks
    assert planned == (((0,),), ((1,),)), "each data rank has one sample"
    source = routed_models.save_model(tmp_path / "source", "glm4_moe")
    recorded = RunPaths(tmp_path / "recorded")
    write_batch(recorded.batch(1, 1), make_batch())
    run = make_run("ranks")
    [line] = run.train(
        ranks=RANKS,
        replay=recorded.rollouts,
        model=source,
        max_steps=1,
        router=RouterConfig(replay="Rollout", bias="Update", bias_rate=RATE),
        parallelism=ParallelismConfig(**{field: RANKS}),
        checkpoint={"interval": 1},
    )
    assert line["routing/replayed_share"] == 1
    total = np.sum(LOADS, axis=0)
    assert line["routing/max_violation"] == pytest.approx(total.max() / total.mean() - 1)
    before, after = read_biases(source), exported_biases(run.paths.checkpoint(1, 1), source, step=1)
    assert before.keys() == after.keys()
    [(name, bias)] = before.items()
    assert (after[name] - bias).tolist() == pytest.approx([RATE * one for one in DIRECTIONS], abs=1e-7)
