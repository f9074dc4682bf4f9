"""Decision records: one header form, and a consistent index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
HEADER = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    r"Status: (?P<status>accepted|(?:partly )?superseded by \[\d+\]\(\S+\.md\))\. "
    r"Date: (?P<date>\d{4}-\d\d-\d\d)\. Supersedes: (?:none|.+)\.\n"
)
ROW = re.compile(r"^\| (\d+) \| \[(.+)\]\((\S+\.md)\) \| (.+) \| (\S+) \|$", re.MULTILINE)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name[:4])
def test_decision_has_the_header_form(record: Path) -> None:
    header = HEADER.match(" ".join(record.read_text().partition("\n\n")[:1]) + "\n\n" + _status_line(record) + "\n")
    assert header is not None, "number and title, then `Status: ... Date: ... Supersedes: ...`"
    assert int(header["number"]) == int(record.name[:4])


def test_decision_index_matches_all_records() -> None:
    listed = {name: (int(number), title, status, date) for number, title, name, status, date in ROW.findall(_index())}
    assert sorted(listed) == [record.name for record in RECORDS]
    assert len(ROW.findall(_index())) == len(RECORDS)
    for record in RECORDS:
        number, title, status, date = listed[record.name]
        assert record.read_text().startswith(f"# {number}. {title}\n")
        assert _status_line(record).startswith(f"Status: {status}. Date: {date}.")


def _index() -> str:
    return (FOLDER / "README.md").read_text()


def _status_line(record: Path) -> str:
    """Return the second paragraph of a record as one line."""
    return " ".join(record.read_text().split("\n\n")[1].split())
