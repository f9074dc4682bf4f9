"""Sizes of a parallel layout: the remainder goes to dpShard, and invalid sizes are refused with field, value and fix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerSpec
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.modeling.packed_attention import row_layout
from rlrun.trainer.modeling.parallel.sharded_rows import _target_runs
from rlrun.trainer.ranks.group import ParallelDims

SIZES = st.integers(1, 4)


@given(replicate=SIZES, shard=SIZES, cp=SIZES, tp=SIZES, pp=SIZES)
def test_remaining_ranks_are_sharded_with_adjacent_data_ranks(
    replicate: int, shard: int, cp: int, tp: int, pp: int
) -> None:
    world = pp * replicate * shard * cp * tp
    dims = ParallelDims.from_config(ParallelismConfig(dp_replicate=replicate, cp=cp, tp=tp, pp=pp), world)
    assert (dims.dp_shard, dims.world_size, dims.data_size) == (shard, world, replicate * shard)
    stages = [[rank for rank in range(world) if dims.pipeline_position(rank) == stage] for stage in range(pp)]
    assert [rank for stage in stages for rank in stage] == [*range(world)]
    for stage in stages:
        ranks = [dims.data_rank(rank) for rank in stage]
        assert ranks == sorted(ranks)
        assert all(ranks.count(data) == cp * tp for data in range(dims.data_size))


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (
            {"tp": 2, "cp": 2},
            6,
            r"trainer\.parallelism: pp \* dpReplicate \* cp \* tp \(4\) must divide the number of ranks \(6",
        ),
        ({"dp_shard": 2}, 4, r"dpReplicate \* dpShard \* cp \* tp \(2\) must be the number of ranks \(4"),
        ({"ep": 3}, 4, r"trainer\.parallelism\.ep \(3\) must divide dpShard \* cp \(4\)"),
        ({"ep": 4, "tp": 2}, 4, r"trainer\.parallelism\.ep \(4\) must divide dpShard \* cp \(2\)"),
    ],
)
def test_invalid_parallel_sizes_are_refused(config: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(RoleError, match=message):
        ParallelDims.from_config(ParallelismConfig(**config), world)
    with pytest.raises(ValueError, match="parallelism"):
        TrainerSpec(processes_per_replica=world, parallelism=ParallelismConfig(**config))


@given(ranks=st.integers(1, 5), run=st.integers(1, 7))
def test_context_ranks_divide_row_with_equal_work(ranks: int, run: int) -> None:
    runs = [_target_runs(rank, ranks, run) for rank in range(ranks)]
    tokens = sorted(position for parts in runs for part in parts for position in part)
    assert tokens == list(range(2 * ranks * run))
    pairs = [sum(position + 1 for part in parts for position in part) for parts in runs]
    assert len(set(pairs)) == 1


def test_row_layout_contains_sequence_boundaries() -> None:
    assert row_layout([3, 2], torch.device("cpu")).boundaries.tolist() == [0, 3, 5]
