"""Escaping of direction controls in foreign text, wherever it is printed or written."""

from __future__ import annotations

import json

import pytest

from rlrun.cli import main as program
from rlrun.runtime.printable import printable_document, without_direction_controls
from rlrun.tracking.tracker_records import Mark, Record, SampleRow
from rlrun.tracking.worker import Outgoing
from rlrun_operator.state import EventRecord

TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize("control", TURNS)
def test_commands_print_no_direction_control(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([f"get{control}x"]) != 0
    assert program.main(["status", f"runs/{control}none"]) != 0
    shown = capsys.readouterr()
    assert control not in shown.out + shown.err
    assert "none" in shown.err


def test_printed_json_keeps_its_meaning_and_colors_stay(capsys: pytest.CaptureFixture[str]) -> None:
    with without_direction_controls():
        print(json.dumps({"a": f"x{TURNS}"}, ensure_ascii=False))
        print("\x1b[1mbold\x1b[0m")
    first, second = capsys.readouterr().out.splitlines()
    assert first.isascii()
    assert json.loads(first) == {"a": f"x{TURNS}"}
    assert second == "\x1b[1mbold\x1b[0m"


def test_status_and_events_hold_no_direction_control() -> None:
    text = f"pod said {TURNS}\nnext"
    assert not set(TURNS) & set(EventRecord("Warning", "Failed", text).message)
    shown = printable_document({"message": text, "failures": [{"message": text}], "step": 3})
    assert not set(TURNS) & set(json.dumps(shown, ensure_ascii=False))
    assert isinstance(shown, dict)
    assert shown["step"] == 3
    assert str(shown["message"]).endswith("\nnext")


def test_trackers_get_no_direction_control() -> None:
    row = SampleRow(TURNS, TURNS, TURNS, TURNS, 1.0, None, "1")
    record = Record(Mark(1, 1), 0.0, {f"reward/{TURNS}": 1.0}, {f"h{TURNS}": [1.0]}, {"samples": [row]})
    sent = Outgoing({}).clean_record(record)
    assert not set(TURNS) & set(
        repr((dict(sent.scalars), dict(sent.histograms), sent.samples["samples"][0].row_values()))
    )
    assert not any(c in str(sent.samples["samples"][0].row_values()) for c in TURNS)
