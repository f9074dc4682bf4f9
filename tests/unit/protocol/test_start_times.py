"""Start times of a trainer, from the metrics of the first step to the annotation and back."""

from __future__ import annotations

import pytest

from rlrun.protocol.messages.lease_annotations import MEASURED, PREFIX, parse_start, start_text, start_times

METRICS = {PREFIX + name: float(at) for at, name in enumerate(MEASURED)}


def test_first_step_reports_start_phases_batch_and_step() -> None:
    found = start_times(METRICS | {"time/step": 7.0, "time/wait_for_batch": 5.0, "loss": 1.0})
    assert found is not None
    assert found == dict(zip(MEASURED, range(6), strict=True)) | {"batch": 5.0, "step": 2.0}
    assert parse_start(start_text(found)) == found


def test_later_step_has_no_start_times() -> None:
    assert start_times({"time/step": 7.0, "time/wait_for_batch": 5.0}) is None


@pytest.mark.parametrize(
    "text", [None, "", "{", "[1]", "3", '{"imports":"x","other":3,"model":true}', '{"imports":NaN}', '{"step":1e9}']
)
def test_invalid_start_text_is_read_as_empty(text: str | None) -> None:
    assert parse_start(text) == {}


def test_overflowing_duration_is_ignored() -> None:
    assert parse_start('{"imports":1' + "0" * 400 + ',"model":2}') == {"model": 2.0}


def test_negative_duration_becomes_zero() -> None:
    assert parse_start('{"imports":-4.0}') == {"imports": 0.0}
