"""Admission in random clusters: no deadlock, no starvation, fair shares; and the bugs that the simulation finds."""

from __future__ import annotations

import pytest

from tests.sim.planted.plant import Plant
from tests.sim.queue.planted import PLANTED, hunt, live, live_saturated

CLUSTERS = 30
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
}
"""Seeds that find a bug at once; where the worlds have changed since, the hunt begins at the first."""
SATURATED_SEED = 2


def test_random_clusters_keep_every_promise() -> None:
    assert {seed: broken for seed in range(CLUSTERS) if (broken := live(seed)) is not None} == {}


def test_namespaces_that_always_want_more_share_by_weight() -> None:
    assert live_saturated(SATURATED_SEED) is None


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Plant) -> None:
    known = FOUND_AT.get(bug.__name__, 0)
    assert hunt(bug, range(known, known + 1)) is not None or hunt(bug, range(WITHIN)) is not None
