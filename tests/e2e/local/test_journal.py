"""An orchestrator that is killed again and again: what was finished is not generated twice, and the order is as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.local.killed_run import GROUPS_PER_STEP, SYNCHRONOUS, KilledRun, changes
from tests.processes.stub.harness.stub_run import stub_run

pytestmark = pytest.mark.full
STEPS = 8


def test_a_run_that_is_killed_three_times_trains_what_the_undisturbed_one_does(tmp_path: Path) -> None:
    rng = random.Random(5)
    with stub_run(tmp_path / "whole", **changes(STEPS)) as undisturbed:
        whole = KilledRun(undisturbed)
        whole.begin()
        whole.start()
        whole.finish()
    with stub_run(tmp_path / "killed", **changes(STEPS)) as disturbed:
        killed = KilledRun(disturbed)
        killed.begin()
        moments: list[Callable[[], bool]] = [
            lambda: len(killed.requests()) >= rng.randint(2, 3) * GROUPS_PER_STEP + 1,  # groups of a step are in flight
            lambda: bool([a for a in disturbed.paths.batches_on_disk() if a.attempt == 2]),  # a batch is made
            lambda: (
                len(killed.requests()) >= killed.kills[-1].asked + 2 * GROUPS_PER_STEP
            ),  # all that are needed are asked for
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
