"""The table of `tests/e2e/chaos`: what would only show after minutes on a cluster."""

from __future__ import annotations

import re

from tests.e2e.chaos.__main__ import start, table
from tests.e2e.chaos.cells import CELLS
from tests.support.faults.rlrun_faults import POINTS, read_plan

ROLES = {"trainer", "inference", "orchestrator"}
NOT_REACHED = {"export.before_rename", "journal.before_remove"} | {p for p in POINTS if p.startswith("turn.")}
"""By a run of the matrix, which is short and exports nothing."""


def test_every_cell_has_a_name_of_its_own_that_a_run_can_have() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])", name) for name in names)


def test_every_point_is_reached_by_a_cell_and_every_plan_can_be_read() -> None:
    plans = [(role, read_plan(text)) for cell in CELLS for role, text in cell.points.items()]
    assert {role for role, _ in plans} == ROLES
    assert {point for _, plan in plans for point in plan} == set(POINTS) - NOT_REACHED


def test_a_cell_breaks_something_in_one_way() -> None:
    assert all((cell.act is None) == bool(cell.points) for cell in CELLS)


def test_cells_that_are_played_again_replace_their_rows_and_no_others() -> None:
    names = [f"| {cell.role} | {cell.fault} " for cell in CELLS[:3]]
    first = table({name: f"{name}| went on | | 1.0 | 0 |" for name in names}, "", 3)
    second = table({names[1]: f"{names[1]}| **failed**: why | | | |"}, first, 5)
    rows = [line for line in second.splitlines() if start(line) in names]
    assert [row.split(" | ")[2][:7] for row in rows] == ["went on", "**faile", "went on"]
    assert f"2 of {len(CELLS)} cells passed" in second
    assert second.count("Played on ") == 2
