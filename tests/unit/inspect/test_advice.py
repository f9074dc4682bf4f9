"""Advice for every reason that the operator reports."""

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


def test_advice_has_no_entry_for_removed_reasons() -> None:
    assert set(ADVICE) - KNOWN - set(get_args(Phase)) == set()


def test_advice_kind_marks_problems_and_ended_runs() -> None:
    found = {reason: ADVICE[reason].kind for reason in reasons.CONDITION_REASONS}
    assert {reason for reason, kind in found.items() if kind == "problem"} == set(reasons.PROBLEMS)
    assert {reason for reason, kind in found.items() if kind == "ended"} == ENDED


def test_local_advice_does_not_mention_cluster() -> None:
    assert not [reason for reason, told in ON_THIS_MACHINE.items() if "kubectl" in told.do or "NAMESPACE" in told.do]
    assert find_advice("StorageFull", local=True) != find_advice("StorageFull", local=False)


def test_advice_for_unknown_reason_links_to_troubleshooting_page() -> None:
    assert "troubleshooting.md" in find_advice("NotKnownHere", local=False).do
