"""Admission in random clusters: no deadlock, no starvation and fair shares, and planted bugs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.planted.plant import Plant
from tests.sim.queue.planted import (
    CONTENDED,
    PLANTED,
    hunt,
    live,
    live_contended,
    live_saturated,
    weights_do_not_count,
)
from tests.sim.queue.promises import PROMISES

CLUSTERS = 30
CONTENDED_CLUSTERS = 8
WITHIN = 60
FOUND_AT = {
    "ending_pods_hold_nothing": 6,
    "an_admission_is_forgotten_until_it_is_recorded": 1,
    "no_room_is_kept": 9,
    "room_that_is_kept_is_given_away": 9,
    "victims_do_not_have_to_be_enough": 30,
    "a_namespace_under_its_share_is_preempted": 7,
    "priority_does_not_count": 6,
    "pods_are_not_packed": 1,
    "releases_do_not_move_a_run_to_the_end": 14,
}
"""Seeds that find a bug immediately; after changes of the worlds, the search starts from the first seed."""
UNEQUAL_WEIGHTS = 1, 7
"""Seeds of saturated worlds with different weights: with preemption and without."""


def test_random_clusters_keep_every_promise() -> None:
    """The clusters contain situations of each promise, because a promise without any would be kept trivially."""
    reached: Counter[str] = Counter()
    assert {seed: broken for seed in range(CLUSTERS) if (broken := live(seed, reached)) is not None} == {}
    contended = {seed: live_contended(seed, reached) for seed in range(CONTENDED_CLUSTERS)}
    assert {seed: broken for seed, broken in contended.items() if broken is not None} == {}
    assert {promise.__name__ for promise in PROMISES} == reached.keys()


@pytest.mark.full
@pytest.mark.parametrize("seed", UNEQUAL_WEIGHTS)
def test_saturated_namespaces_share_by_weight(seed: int) -> None:
    assert live_saturated(seed) is None


@pytest.mark.full
def test_ignored_weights_are_found() -> None:
    seed = UNEQUAL_WEIGHTS[0]
    assert hunt(weights_do_not_count, range(seed, seed + 1), live_saturated) == seed


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Plant) -> None:
    known = FOUND_AT.get(bug.__name__, 0)
    assert hunt(bug, range(known, known + 1)) is not None or hunt(bug, range(WITHIN)) is not None


CONTENDED_AT = {
    "a_young_run_is_preempted_for_a_share": 1,
    "more_runs_are_preempted_than_needed": 7,
    "runs_start_that_the_scheduler_could_put_into_kept_room": 2,
    "an_admitted_run_without_room_holds_back_no_other": 3,
    "arrival_does_not_count": 0,
}
"""Seeds of worlds in which one namespace has borrowed the shares of others."""


@pytest.mark.parametrize("bug", CONTENDED, ids=lambda bug: bug.__name__)
def test_planted_bug_of_one_pass_is_found(bug: Plant) -> None:
    known = CONTENDED_AT[bug.__name__]
    seeds = range(known, known + 1), range(WITHIN)
    assert any(hunt(bug, each, live_contended) is not None for each in seeds)
