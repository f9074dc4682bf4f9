"""Run that is killed repeatedly, compared bitwise with the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import Run, record
from tests.trainer.kills import curve, final_weights, longest, survive

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("ranks", "kills"), [(1, 2), (2, 3)])
def test_repeatedly_killed_run_equals_undisturbed_run(
    make_run: Callable[[str], Run], tmp_path: Path, ranks: int, kills: int
) -> None:
    steps = longest(kills)
    batches = record(tmp_path / "recorded", steps)
    undisturbed, run = make_run("undisturbed"), make_run("killed")
    undisturbed.train(ranks=ranks, replay=batches, max_steps=steps)
    blows = survive(run, kills=kills, seed=ranks, steps=steps, ranks=ranks, replay=batches)
    assert sorted(curve(run)) == list(range(1, steps + 1))
    assert curve(run) == curve(undisturbed), blows
    assert final_weights(run) == final_weights(undisturbed), blows
