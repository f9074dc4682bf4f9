"""No rank has a model whole when it is loaded, whatever its files are like: bytes that are read and that live, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.trainer.loading_memory import HYBRID, KINDS

PADDING = 1.05
"""Small tensors do not divide evenly."""
READS = 3
"""Slices that live beside the shard: as read, joined, and in the shard's number format."""


CASES = [*((2, kind) for kind in KINDS), *((4, kind) for kind in (*KINDS, HYBRID))]
"""Ranks and kind of files; a hybrid layout needs four."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loading")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.loading_memory", str(folder), str(request.param), str(free_port())],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize(("found", "kind"), CASES, indirect=["found"])
def test_a_rank_reads_its_part_and_holds_no_more(found: tuple[int, dict[str, Any]], kind: str) -> None:
    ranks, cases = found
    shards = ranks // 2 if kind == HYBRID else ranks
    for rank in cases[kind]:
        assert rank["shard"] <= PADDING * rank["whole"] / shards
        assert rank["read"] <= PADDING * rank["whole"] / shards
        assert rank["largest_read"] <= rank["largest"] / shards
        assert rank["peak"] <= PADDING * rank["whole"] / shards + READS * rank["largest"] / shards
    assert sum(rank["read"] for rank in cases[kind]) >= cases[kind][0]["whole"] * ranks / shards
