"""Table of cells in `tests/e2e/chaos`. Errors in it would otherwise appear only after minutes on a cluster."""

from __future__ import annotations

import re

from tests.e2e.chaos.__main__ import start, table
from tests.e2e.chaos.cells import CELLS
from tests.support.faults.rlrun_faults import POINTS, read_plan

ROLES = {"trainer", "inference", "orchestrator"}
NOT_REACHED = {"export.before_rename", "journal.before_remove"} | {p for p in POINTS if p.startswith("turn.")}
"""Points that no matrix run reaches, because its runs are short and export nothing."""


def test_cell_names_are_unique_and_valid_run_names() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])", name) for name in names)


def test_cells_reach_all_fault_points() -> None:
    plans = [(role, read_plan(text)) for cell in CELLS for role, text in cell.points.items()]
    assert {role for role, _ in plans} == ROLES
    assert {point for _, plan in plans for point in plan} == set(POINTS) - NOT_REACHED


def test_cell_has_either_act_or_fault_points() -> None:
    assert all((cell.act is None) == bool(cell.points) for cell in CELLS)


def test_repeated_cells_replace_only_their_rows() -> None:
    names = [f"| {cell.role} | {cell.fault} " for cell in CELLS[:3]]
    first = table({name: f"{name}| went on | | 1.0 | 0 |" for name in names}, "", 3)
    second = table({names[1]: f"{names[1]}| **failed**: why | | | |"}, first, 5)
    rows = [line for line in second.splitlines() if start(line) in names]
    assert [row.split(" | ")[2][:7] for row in rows] == ["went on", "**faile", "went on"]
    assert f"2 of {len(CELLS)} cells passed" in second
    assert second.count("Played on ") == 2
