"""Rows of columnar files: equal in any read order, although a sequential reader receives several rows per slice."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlrun.environments.dataset_rows import _READ_AHEAD, ArrowTable

COUNT = 3 * _READ_AHEAD + 5


def test_rows_are_the_same_in_any_order(tmp_path: Path) -> None:
    expected = [{"prompt": f"{i}?", "extra": {"index": i}} for i in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(expected), tmp_path / "rows.parquet")
    table = ArrowTable(tmp_path / "rows.parquet")
    forward = list(range(COUNT))
    mixed = random.Random(1).choices([*forward, *range(10)], k=500)
    for order in (forward, forward, [5, 6, 7, 7, 8, 6, 7], forward[::-1], [*range(100), *range(50, 150)], mixed):
        assert [table.row(i) for i in order] == [expected[i] for i in order]
