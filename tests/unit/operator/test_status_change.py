"""Changes of a run's status and their combination."""

from __future__ import annotations

import typing
from dataclasses import fields

import pytest

from rlrun.api.run_status import RLRunStatus, StorageStatus
from rlrun_operator.status.conditions import NO_CHANGE, UNSET, StatusChange, Unset


def test_status_change_has_every_status_field() -> None:
    of_change, of_status = typing.get_type_hints(StatusChange), typing.get_type_hints(RLRunStatus)
    assert [field.name for field in fields(StatusChange)] == list(RLRunStatus.model_fields)
    for name in RLRunStatus.model_fields:
        assert of_change[name] == of_status[name] | Unset, name


def test_unset_field_is_kept_and_none_removes_it() -> None:
    past = RLRunStatus(attempt=2, storage=StorageStatus(claim_name="a", path="/data/a"), next_retry_time="then")
    new = StatusChange(attempt=3, next_retry_time=None).applied_to(past)
    assert (new.attempt, new.storage, new.next_retry_time) == (3, past.storage, None)
    assert NO_CHANGE.applied_to(past) == past


def test_later_status_change_wins() -> None:
    both = StatusChange(attempt=1, restarts=4, start_time="then") | StatusChange(attempt=2, start_time=None)
    assert both == StatusChange(attempt=2, restarts=4, start_time=None)
    assert both.phase is UNSET


def test_misspelled_status_field_is_refused() -> None:
    with pytest.raises(TypeError, match="atempt"):
        StatusChange(atempt=1)  # type: ignore[call-arg]
