"""Memory of model loading: counted bytes show that no rank holds the whole model for any kind of files."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import run_program
from tests.trainer.loading_memory import HYBRID, KINDS, QUANTIZED

pytestmark = pytest.mark.full

PADDING = 1.05
"""Limit factor, because small tensors do not divide evenly."""
READS = 3
"""Slices held in addition to the shard: as read, joined, and converted."""


CASES = [*((2, kind) for kind in KINDS), *((4, kind) for kind in (*KINDS, HYBRID))]
"""Number of ranks and kind of files; a hybrid layout needs four."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Return each rank's bytes by kind; the first request for a number of ranks loads all kinds."""

    @functools.cache
    def of(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("loading")
        done = run_program(
            [sys.executable, "-m", "tests.trainer.loading_memory", str(folder), str(ranks), str(free_port())]
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads((folder / "found.json").read_text()))

    return of


@pytest.mark.parametrize(("ranks", "kind"), CASES)
def test_rank_reads_and_holds_only_its_shard(measured: Callable[[int], dict[str, Any]], ranks: int, kind: str) -> None:
    cases = measured(ranks)
    shards = ranks // 2 if kind == HYBRID else ranks
    for rank in cases[kind]:
        assert rank["shard"] <= PADDING * rank["whole"] / shards
        assert rank["read"] <= PADDING * rank["whole"] / shards
        assert rank["largest_read"] <= rank["largest"] / shards
        assert rank["peak"] <= PADDING * rank["whole"] / shards + READS * rank["largest"] / shards
    assert sum(rank["read"] for rank in cases[kind]) >= cases[kind][0]["whole"] * ranks / shards


@pytest.mark.parametrize("kind", QUANTIZED)
def test_each_of_two_ranks_reads_half_of_quantized_files(measured: Callable[[int], dict[str, Any]], kind: str) -> None:
    """Blocks that two ranks share are read twice, but only their scales."""
    ranks = measured(2)[kind]
    for rank in ranks:
        assert 0 < rank["read"] <= 0.55 * rank["stored"]
        assert rank["stored"] < 0.6 * rank["whole"]
    assert sum(rank["read"] for rank in ranks) >= ranks[0]["stored"]
