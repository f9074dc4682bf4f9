"""No rank has a model whole when it is loaded, whatever its files are like: bytes that are read and that live, counted."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import run_program
from tests.trainer.loading_memory import HYBRID, KINDS

pytestmark = pytest.mark.full

PADDING = 1.05
"""Small tensors do not divide evenly."""
READS = 3
"""Slices that live beside the shard: as read, joined, and in the shard's number format."""


CASES = [*((2, kind) for kind in KINDS), *((4, kind) for kind in (*KINDS, HYBRID))]
"""Ranks and kind of files; a hybrid layout needs four."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Each rank's bytes by kind; a number of ranks loads all kinds in one start, when it is first asked for."""

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
def test_a_rank_reads_its_part_and_holds_no_more(
    measured: Callable[[int], dict[str, Any]], ranks: int, kind: str
) -> None:
    cases = measured(ranks)
    shards = ranks // 2 if kind == HYBRID else ranks
    for rank in cases[kind]:
        assert rank["shard"] <= PADDING * rank["whole"] / shards
        assert rank["read"] <= PADDING * rank["whole"] / shards
        assert rank["largest_read"] <= rank["largest"] / shards
        assert rank["peak"] <= PADDING * rank["whole"] / shards + READS * rank["largest"] / shards
    assert sum(rank["read"] for rank in cases[kind]) >= cases[kind][0]["whole"] * ranks / shards
