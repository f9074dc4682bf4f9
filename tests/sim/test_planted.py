"""Planted bugs, which the simulation must find to be meaningful (`python -m tests.sim --planted`)."""

from __future__ import annotations

import pytest

from tests.sim.history import live
from tests.sim.planted import PLANTED, QUEUED, hunt, planted
from tests.sim.planted.plant import Plant

LEAST = 10
BY_NAME = {bug.__name__: bug for bug in PLANTED}
FOUND_AT: dict[str, int] = {
    "ending_pods_are_taken_for_gone": 15,
    "the_controller_is_not_waited_for": 100,
    "disruptions_count": 3,
    "the_limit_is_one_too_high": 1882,
    "the_cache_is_believed_when_it_lacks_something": 7,
    "what_a_deleted_run_has_left_is_taken_over": 10,
    "attempts_rise_twice": 4,
    "the_status_is_written_before_the_children": 2,
    "a_refused_status_is_taken_for_written": 3,
    "the_status_is_written_without_preconditions": 26,
    "what_has_ended_begins_again": 90,
    "an_older_state_replaces_a_newer_one": 2,
    "a_late_event_brings_back_what_is_gone": 5,
    "a_comparison_forgets_nothing": 70,
    "a_backoff_wakes_nobody": 2,
    "a_step_is_taken_for_every_failure": 3,
    "a_pod_works_until_its_sidecars_have_ended": 41,
    "the_last_request_to_delete_is_taken_for_the_first": 5,
    "the_observed_generation_is_ignored": 100,
    "a_retry_time_far_in_the_future_is_believed": 17,
    "the_lease_of_a_deleted_namesake_is_taken_for_the_own_one": 225,
    "the_oldest_event_is_told": 115,
    "a_lost_deployment_is_not_made_again": 12,
    "a_lost_lease_is_not_made_again": 108,
    "small_objects_are_made_for_the_first_attempt_alone": 5,
    "what_exists_is_not_applied_again": 5,
    "what_is_deleted_waits_for_the_next_attempt": 2,
    "an_edit_of_a_small_object_is_not_noticed": 2,
    "a_pod_waits_for_ever_for_a_lost_configuration": 20919,
    "a_pod_waits_for_ever_for_a_lost_key": 156,
    "another_key_has_the_name_of_the_first": 47,
    "engines_hold_a_deleted_claim": 66,
    "objects_of_others_are_taken_over": 23,
    "a_name_that_was_taken_stays_so": 2,
    "what_admission_refuses_fails_the_run": 4,
    "a_refused_removal_is_told_to_nobody": 2506,
    "a_webhook_that_is_away_is_told_to_nobody": 434,
    "what_was_refused_is_told_for_ever": 140,
    "a_rejection_outlives_the_edit_that_mends_it": 13,
    "a_refused_resumption_is_taken_for_begun": 2513,
    "what_has_no_number_is_called_starting": 18,
    "what_was_kept_out_is_never_tried_again": 159,
    "another_release_renders_what_runs_again": 3,
    "a_new_leader_believes_its_first_list": 1978,
    "a_second_operator_is_not_looked_for": 1700,
    "the_past_is_told_again_and_believed": 2,
    "a_pod_is_counted_from_its_beginning_each_time": 11,
    "time_is_counted_in_ticks": 14,
    "what_is_gone_is_not_counted_to_its_end": 267,
}
"""Seeds that find a bug immediately; after changes of the actions, the search starts from the first seed."""


def test_planted_bugs_reach_the_required_number() -> None:
    assert len(PLANTED) >= LEAST


def test_every_planted_bug_has_a_seed() -> None:
    assert FOUND_AT.keys() == BY_NAME.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", FOUND_AT)
def test_planted_bug_is_found(name: str) -> None:
    bug, seed = BY_NAME[name], FOUND_AT[name]
    found = hunt(bug, seed, 1) or hunt(bug, 0)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")


QUEUED_AT = {
    "pods_are_made_before_the_admission_is_on_record": 0,
    "a_run_that_is_younger_than_the_plan_is_not_asked_about": 28,
    "a_back_off_counts_by_a_clock_that_is_set": 3,
    "an_admitted_run_says_nothing_until_it_starts": 0,
}
"""Seeds of the bugs of an operator with a queue."""


def test_every_planted_queue_bug_has_a_seed() -> None:
    assert QUEUED_AT.keys() == {bug.__name__ for bug in QUEUED}


@pytest.mark.full
@pytest.mark.parametrize("bug", QUEUED, ids=lambda bug: bug.__name__)
def test_planted_queue_bug_is_found(bug: Plant) -> None:
    found = hunt(bug, QUEUED_AT[bug.__name__], 1, queued=True) or hunt(bug, 0, queued=True)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")


def test_planted_bug_is_removed_afterwards() -> None:
    for bug in PLANTED:
        with planted(bug):
            pass
    assert live(FOUND_AT["disruptions_count"]) is None
