"""Bugs that are planted must be found: a simulation that finds nothing proves nothing (`python -m tests.sim --planted`)."""

from __future__ import annotations

import pytest

from tests.sim.history import live
from tests.sim.planted import PLANTED, hunt, planted

LEAST = 10
BY_NAME = {bug.__name__: bug for bug in PLANTED}
FOUND_AT: dict[str, int] = {
    "ending_pods_are_taken_for_gone": 4,
    "the_controller_is_not_waited_for": 755,
    "disruptions_count": 5,
    "the_limit_is_one_too_high": 713,
    "the_cache_is_believed_when_it_lacks_something": 24,
    "what_a_deleted_run_has_left_is_taken_over": 0,
    "attempts_rise_twice": 5,
    "the_status_is_written_before_the_children": 5,
    "a_refused_status_is_taken_for_written": 6,
    "the_status_is_written_without_preconditions": 35,
    "what_has_ended_begins_again": 39,
    "an_older_state_replaces_a_newer_one": 0,
    "a_late_event_brings_back_what_is_gone": 5,
    "a_comparison_forgets_nothing": 43,
    "a_backoff_wakes_nobody": 4,
    "a_step_is_taken_for_every_failure": 2,
    "a_pod_works_until_its_sidecars_have_ended": 10,
    "the_last_request_to_delete_is_taken_for_the_first": 16,
}
"""Seeds that find a bug at once; where the actions have changed since, the hunt begins anew."""


def test_there_are_enough() -> None:
    assert len(PLANTED) >= LEAST


def test_each_is_looked_for() -> None:
    assert FOUND_AT.keys() == BY_NAME.keys()


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
