"""Batches of earlier attempts that a new attempt trains without changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from rlrun.orchestrator.checkpoint import (
    Snapshot,
    TaskSet,
    base_snapshot,
    newest_complete,
    read_snapshot,
    readmissible_batches,
    report_changed_tasks,
    write_snapshot,
)
from rlrun.orchestrator.journal.frames import Entry, RolloutEntry
from rlrun.orchestrator.journal.ledger import Ledger, LedgerState
from rlrun.orchestrator.journal.recovery import Found, readmit_entries
from rlrun.orchestrator.tasks.sampler import Sampler, Source
from rlrun.orchestrator.types import Rollout
from rlrun.protocol.files.attempts import Attempt, first_attempt, next_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, write_manifest
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


def leave_batch(paths: RunPaths, step: int, attempt: int, *, versions: list[int], group: int, dispatched: int) -> None:
    count = len(versions)
    sample = Sample(
        np.arange(count + 1, dtype=np.int32),
        np.array([False] + [True] * count),
        np.full(count + 1, -0.5, np.float32) * np.array([0] + [1] * count, np.float32),
        np.array([-1, *versions], np.int32),
        np.zeros(count + 1, np.float32),
        1.0,
        "e",
        f"t{group}",
        group,
        0,
        dispatched,
        1.0,
    )
    write_batch(paths.batch(step, attempt), Batch(step, attempt, (sample,)))


def lineage(paths: RunPaths) -> Attempt:
    """Write a lineage. Attempt 1 trained versions 1 to 6; attempt 2 started from the model and saved step 4; attempt 3 continues it."""
    first = first_attempt(world_size=1, config_hash="h")
    second = first_attempt(world_size=1, config_hash="h", attempt=2)
    third = next_attempt(second, 4, attempt=3, world_size=1, config_hash="h")
    for attempt in (first, second, third):
        write_attempt(paths, attempt)
    return third


def taken_over(paths: RunPaths, attempt: Attempt, *, limit: int = 8, first_group: int = 0) -> list[int]:
    ledger = Ledger(next_group=first_group)
    batches = list(readmissible_batches(paths, attempt, ledger, max_off_policy_steps=limit))
    assert all(batch.attempt == attempt.attempt for batch in batches)
    return [batch.step for batch in batches]


def test_reused_batches_follow_base_without_gap(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    for step in (4, 5, 6, 8):
        leave_batch(paths, step, 2, versions=[3, 4], group=step, dispatched=3)
    assert taken_over(paths, attempt) == [5, 6]


@pytest.mark.parametrize(
    ("writer", "versions", "dispatched", "expected"),
    [
        (2, [3, 4], 3, [5]),
        (2, [3, 5], 3, []),  # version 5 was trained after the base: it is lost
        (1, [3, 4], 3, []),  # attempt 1's version 4 is another one
        (1, [0, 0], 0, [5]),  # the model itself is the same for all
        (2, [3, 4], 1, []),  # too old for step 5 with a limit of 2
        (4, [3, 4], 3, []),  # not an attempt of this run
    ],
)
def test_batch_is_reused_only_if_fresh_and_of_lineage(
    tmp_path: Path, writer: int, versions: list[int], dispatched: int, expected: list[int]
) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    leave_batch(paths, 5, writer, versions=versions, group=9, dispatched=dispatched)
    assert taken_over(paths, attempt, limit=2 if dispatched else 8) == expected


def test_batch_of_trained_groups_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    leave_batch(paths, 5, 2, versions=[4], group=9, dispatched=4)
    assert taken_over(paths, attempt, first_group=10) == []


def test_base_checkpoint_restores_orchestrator_state(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    state = LedgerState(40, (31, 35), {"errors": 3})
    write_snapshot(paths.checkpoint(4, 2), Snapshot(4, state, ({"step": 4, "loss": 1.0},)))
    assert base_snapshot(paths, attempt) == Snapshot(4, state, ({"step": 4, "loss": 1.0},))


def test_another_data_set_on_resume_is_reported_by_environment(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    saved: dict[str, TaskSet] = {
        "same": {"size": 10, "digest": "aa"},
        "grown": {"size": 10, "digest": "bb"},
        "edited": {"size": 10, "digest": "cc"},
        "unknown": {"size": 10, "digest": ""},
    }
    write_snapshot(paths.checkpoint(4, 2), Snapshot(4, LedgerState(40, (), {}), tasks=saved))
    base = base_snapshot(paths, attempt)
    assert base.tasks == saved
    now: dict[str, TaskSet] = saved | {
        "grown": {"size": 12, "digest": ""},
        "edited": {"size": 10, "digest": "dd"},
        "unknown": {"size": 10, "digest": "ee"},
        "new": {"size": 1, "digest": "ff"},
    }
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    try:
        assert report_changed_tasks(base, now) == {"grown", "edited"}
    finally:
        logger.remove(sink)
    assert "the training tasks of environment 'grown' differ from the checkpoint of step 4: 12 tasks" in lines[0]
    assert "instead of 10 tasks (digest cc)" in lines[1]


def test_rollouts_of_changed_tasks_are_refused() -> None:
    sampler = Sampler(0, [Source("old", 4), Source("changed", 4)])
    entries: list[Entry] = [
        RolloutEntry(group, 0, sampler.sources[draw.environment].label, draw.task, 0, 1.0, Rollout((), 1.0))
        for group in range(8)
        for draw in [sampler.draw(group)]
    ]
    finished: list[str] = []
    steps = readmit_entries(
        Found(entries, uncounted={(group, 0) for group in range(8)}),
        is_old=lambda version: False,
        ledger=Ledger(),
        sampler=sampler,
        environments=[("old", 1), ("changed", 1)],
        finish=lambda group: finished.append(group.environment),
        drop=lambda entry: None,
        changed={"changed"},
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            back = end.value
            break
    assert finished == ["old"] * 4
    assert back.refused == {"task": 4}


def test_checkpoint_deleted_during_scan_is_ignored(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = lineage(paths)
    state = LedgerState(40, (31, 35), {})
    for step, number in ((3, 2), (6, 3)):
        write_snapshot(paths.checkpoint(step, number), Snapshot(step, state))
        write_manifest(paths.checkpoint(step, number), Manifest(step, number, 1, "h", (), 0.0))
    found = newest_complete(paths, attempt)
    assert found is not None
    assert found.step == 6
    assert [group for group in range(42) if found.ledger.settled()(group)] == [
        g for g in range(40) if g not in (31, 35)
    ]
    shutil.rmtree(paths.checkpoint(6, 3) / "orchestrator")
    assert newest_complete(paths, attempt) is None


def test_checkpoint_without_orchestrator_state_is_refused_with_path(tmp_path: Path) -> None:
    with pytest.raises(RoleError, match=r"step_00000004\.a0002.*state\.json") as caught:
        read_snapshot(RunPaths(tmp_path).checkpoint(4, 2))
    assert caught.value.code == exit_codes.DATA
