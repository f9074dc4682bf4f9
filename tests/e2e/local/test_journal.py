"""Repeatedly killed orchestrator: finished rollouts are not generated again, and the order stays the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.local.killed_run import GROUPS_PER_STEP, SYNCHRONOUS, KilledRun, make_changes
from tests.processes.stub.harness.stub_run import stub_run

pytestmark = pytest.mark.full
STEPS = 8


def test_run_killed_three_times_equals_undisturbed_run(tmp_path: Path) -> None:
    rng = random.Random(5)
    with stub_run(tmp_path / "whole", **make_changes(STEPS)) as undisturbed:
        whole = KilledRun(undisturbed)
        whole.begin()
        whole.start()
        whole.finish()
    with stub_run(tmp_path / "killed", **make_changes(STEPS)) as disturbed:
        killed = KilledRun(disturbed)
        killed.begin()
        moments: list[Callable[[], bool]] = [
            lambda: len(killed.requests()) >= rng.randint(2, 3) * GROUPS_PER_STEP + 1,  # groups of a step are in flight
            lambda: bool([a for a in disturbed.paths.batches_on_disk() if a.attempt == 2]),  # a batch is written
            lambda: (
                len(killed.requests()) >= killed.kills[-1].asked + 2 * GROUPS_PER_STEP
            ),  # all needed groups are requested
        ]
        for moment in moments:
            killed.start()
            killed.until(moment, "the moment to kill it")
            killed.kill()
        killed.start()
        killed.finish()
        assert killed.generated_again(SYNCHRONOUS["max_off_policy_steps"]) == []
        assert killed.trained() == whole.trained()
        assert list(killed.trained()) == list(range(1, STEPS + 1))
        assert any(kill.finished for kill in killed.kills)
        assert disturbed.paths.journal_on_disk() == []
