"""Switch that slows down processes under test."""

from __future__ import annotations

import sys

import pytest

from tests.support.programs import run_program
from tests.support.slow import SLOW, patience, program, seconds


def test_unset_variable_slows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SLOW, raising=False)
    assert (program("print(1)", "tests.controlplane.slow_operator.slow_down"), patience()) == ("print(1)", 1.0)


@pytest.mark.parametrize("slow_down", ["tests.controlplane.slow_operator.slow_down", "tests.support.slow.slow_answers"])
def test_set_variable_slows_program(monkeypatch: pytest.MonkeyPatch, slow_down: str) -> None:
    monkeypatch.setenv(SLOW, "0.3-1.5")
    made = program("print('began')", slow_down)
    ended = run_program([sys.executable, "-c", made])
    assert ended.stdout == "began\n", ended.stderr
    assert patience() > 1.0


@pytest.mark.parametrize("text", ["", "1", "2-1", "a-b", "-1-2"])
def test_invalid_range_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"RLRUN_TEST_SLOW: .* is no range of seconds; write it like 0\.3-1\.5"):
        seconds(text)
