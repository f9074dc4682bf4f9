"""Every reason that the operator knows has advice: a new one without fails here."""

from __future__ import annotations

from typing import get_args

import pytest

from rlrun.api.lifecycle import FailureReason
from rlrun.api.run_status import Phase
from rlrun.inspect.advice import ADVICE, ON_THIS_MACHINE, find_advice
from rlrun_operator.status import failure_reasons, reasons

KNOWN = {*reasons.CONDITION_REASONS, *reasons.EVENT_REASONS, *failure_reasons.FAILURE_REASONS, *get_args(FailureReason)}
ENDED = {
    reasons.INVALID_CONFIGURATION,
    reasons.FORBIDDEN,
    reasons.PERMANENT_FAILURE,
    reasons.MAX_RESTARTS_EXCEEDED,
    reasons.DEADLINE_EXCEEDED,
    reasons.FAILED_BY_RULE,
    reasons.FAILED_TO_START,
}


@pytest.mark.parametrize("reason", sorted(KNOWN))
def test_each_reason_has_advice(reason: str) -> None:
    assert reason in ADVICE, "say in rlrun/inspect/advice.py what to do about it"
    assert ADVICE[reason].do.endswith((".", "`"))


def test_no_advice_is_left_of_a_reason_that_is_gone() -> None:
    assert set(ADVICE) - KNOWN - set(get_args(Phase)) == set()


def test_what_a_person_should_hear_of_is_a_problem_and_what_ends_a_run_is_its_end() -> None:
    found = {reason: ADVICE[reason].kind for reason in reasons.CONDITION_REASONS}
    assert {reason for reason, kind in found.items() if kind == "problem"} == set(reasons.PROBLEMS)
    assert {reason for reason, kind in found.items() if kind == "ended"} == ENDED


def test_a_run_on_this_machine_is_told_of_no_cluster() -> None:
    assert not [reason for reason, told in ON_THIS_MACHINE.items() if "kubectl" in told.do or "NAMESPACE" in told.do]
    assert find_advice("StorageFull", local=True) != find_advice("StorageFull", local=False)


def test_a_reason_of_a_newer_operator_points_to_its_page() -> None:
    assert "troubleshooting.md" in find_advice("NotKnownHere", local=False).do
