"""Bugs that are planted must be found: a simulation that finds nothing proves nothing (`python -m tests.sim --planted`)."""

from __future__ import annotations

import pytest

from tests.sim.history import live
from tests.sim.planted import PLANTED, hunt, planted

LEAST = 10
BY_NAME = {bug.__name__: bug for bug in PLANTED}
FOUND_AT: dict[str, int] = {
    "ending_pods_are_taken_for_gone": 3,
    "the_controller_is_not_waited_for": 28,
    "disruptions_count": 0,
    "the_status_is_written_before_the_children": 26,
    "a_refused_status_is_taken_for_written": 47,
    "attempts_rise_twice": 43,
    "the_status_is_written_without_preconditions": 75,
    "a_comparison_forgets_nothing": 13,
    "a_backoff_wakes_nobody": 0,
    "a_step_is_taken_for_every_failure": 0,
    "a_pod_works_until_its_sidecars_have_ended": 55,
    "the_last_request_to_delete_is_taken_for_the_first": 125,
}
"""Seeds that find a bug at once; where the actions have changed since, the hunt begins anew."""


def test_there_are_enough() -> None:
    assert len(PLANTED) >= LEAST


@pytest.mark.parametrize("name", FOUND_AT)
def test_a_planted_bug_is_found(name: str) -> None:
    bug, seed = BY_NAME[name], FOUND_AT[name]
    found = hunt(bug, seed, 1) or hunt(bug, 0)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")


def test_what_is_planted_goes_again() -> None:
    for bug in PLANTED:
        with planted(bug):
            pass
    assert live(FOUND_AT["disruptions_count"]) is None
