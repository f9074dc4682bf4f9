"""Fixed histories of autoscaled and spot engines, and planted bugs that they find."""

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
"""Seeds that find a bug immediately; after changes of the actions, the search starts from the first seed."""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_engine_histories_keep_their_invariants(seed: int) -> None:
    failure = live(seed, engines=True)
    assert failure is None, str(failure)


def test_deleted_key_ends_attempt_for_any_waiting_engine() -> None:
    replay([("long calm with engines", 1, 9), ("child deleted", 8, 3)], seed=638, engines=True)


def test_disruption_budget_is_not_recreated_for_one_engine() -> None:
    replay([("calm", 6, 2), ("share edited", 6, 11), ("child deleted", 10, 6)], seed=557, engines=True)


def test_retries_under_a_quota_explain_their_writes() -> None:
    """A ConfigMap refused by a quota is retried every 10 s together with the other objects (seed 5099)."""
    steps = [("refused", 7, 0), *[("long calm with engines", 11, 11)] * 3, ("run made anew", 2, 5), ("calm", 3, 4)]
    replay(steps, seed=5099, engines=True)


def test_every_planted_bug_has_a_seed() -> None:
    assert FOUND_AT.keys() == {bug.__name__ for bug in ENGINES}


@pytest.mark.full
@pytest.mark.parametrize("bug", ENGINES, ids=lambda bug: bug.__name__)
def test_planted_engine_bug_is_found(bug: Plant) -> None:
    found = hunt(bug, FOUND_AT[bug.__name__], 1, engines=True) or hunt(bug, 0, WITHIN, engines=True)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")
