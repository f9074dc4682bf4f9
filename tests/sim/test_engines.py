"""Histories of engines by load and on interruptible nodes, always the same ones, and bugs of these, each of which one of them finds."""

from __future__ import annotations

import pytest

from tests.sim.history import live, replay
from tests.sim.planted import ENGINES, hunt
from tests.sim.planted.plant import Plant

HISTORIES = 16
WITHIN = 60
FOUND_AT: dict[str, int] = {
    "a_lost_spot_engine_ends_the_attempt": 28,
    "a_run_waits_for_its_spot_engines": 1,
    "spot_engines_are_forgotten_at_the_end": 7,
    "engines_go_before_they_are_drained": 0,
    "what_was_chosen_is_not_read_again": 0,
    "every_report_is_decided_on": 0,
}
"""Seeds that find a bug at once; where the actions have changed since, the hunt begins anew."""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_engines_come_and_go_rightly_whatever_happens(seed: int) -> None:
    failure = live(seed, engines=True)
    assert failure is None, str(failure)


def test_a_key_that_was_deleted_ends_the_attempt_whichever_engine_waits_for_it() -> None:
    replay([("long calm with engines", 1, 9), ("child deleted", 8, 3)], seed=638, engines=True)


def test_a_budget_is_not_made_again_for_one_engine_beside_those_on_interruptible_nodes() -> None:
    replay([("calm", 6, 2), ("share edited", 6, 11), ("child deleted", 10, 6)], seed=557, engines=True)


def test_a_long_calm_under_a_quota_and_a_run_made_anew_explain_their_writes() -> None:
    """A ConfigMap that a quota keeps out is tried every 10 s with all that stands beside it (seed 5099)."""
    steps = [("refused", 7, 0), *[("long calm with engines", 11, 11)] * 3, ("run made anew", 2, 5), ("calm", 3, 4)]
    replay(steps, seed=5099, engines=True)


def test_each_is_looked_for() -> None:
    assert FOUND_AT.keys() == {bug.__name__ for bug in ENGINES}


@pytest.mark.full
@pytest.mark.parametrize("bug", ENGINES, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_engines_is_found(bug: Plant) -> None:
    found = hunt(bug, FOUND_AT[bug.__name__], 1, engines=True) or hunt(bug, 0, WITHIN, engines=True)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")
