"""Seconds of a trainer's start: from the metrics of a first step to the text of an annotation, and back."""

from __future__ import annotations

import pytest

from rlrun.protocol.messages.lease_annotations import MEASURED, PREFIX, parse_start, start_text, start_times

METRICS = {PREFIX + name: float(at) for at, name in enumerate(MEASURED)}


def test_a_first_step_has_the_phases_that_the_trainer_measured_its_batch_and_itself() -> None:
    found = start_times(METRICS | {"time/step": 7.0, "time/wait_for_batch": 5.0, "loss": 1.0})
    assert found is not None
    assert found == dict(zip(MEASURED, range(6), strict=True)) | {"batch": 5.0, "step": 2.0}
    assert parse_start(start_text(found)) == found


def test_a_later_step_has_none() -> None:
    assert start_times({"time/step": 7.0, "time/wait_for_batch": 5.0}) is None


@pytest.mark.parametrize(
    "text", [None, "", "{", "[1]", "3", '{"imports":"x","other":3,"model":true}', '{"imports":NaN}', '{"step":1e9}']
)
def test_a_text_of_anybody_is_read_without_an_error(text: str | None) -> None:
    assert parse_start(text) == {}


def test_a_number_that_no_float_holds_is_no_duration() -> None:
    assert parse_start('{"imports":1' + "0" * 400 + ',"model":2}') == {"model": 2.0}


def test_a_clock_that_was_set_back_makes_zero() -> None:
    assert parse_start('{"imports":-4.0}') == {"imports": 0.0}
