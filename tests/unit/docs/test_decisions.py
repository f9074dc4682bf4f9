"""Decision records: few, one form of header and sections, a consistent index, and resolvable references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
DATE = r"\d{4}-\d\d-\d\d"
HEADER = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    r"Status: (?P<status>accepted|(?:partly )?superseded by \[\d+\]\(\S+\.md\))\. "
    rf"First decision: (?P<first>{DATE})\. Last decision: (?P<last>{DATE})\. "
    r"Supersedes: (?P<supersedes>none|\d+(?:, \d+)*)\.\n"
)
ROW = re.compile(rf"^\| (\d+) \| \[(.+)\]\((\S+\.md)\) \| (.+) \| ({DATE}) \| ({DATE}) \|$", re.MULTILINE)
FORMER = re.compile(r"^\| (\d+) \| (\[\d+\]\(\S+\.md\)(?:, \[\d+\]\(\S+\.md\))*) \|$", re.MULTILINE)
CITATION = re.compile(r"\bdecisions?\s+(?:#\s+)?((?:\[?\d+\]?)(?:(?:, | and |, and | or )\[?\d+\]?)*)", re.IGNORECASE)
"""`decision 5`, `decisions 5 and 6`, also across lines of a comment."""
LINK = re.compile(r"decisions/(\d{4}(?:-[\w-]+\.md)?)")
FOLDERS = (
    *("docs", "operator", "workloads", "tests", "tools", "benchmarks", "charts", "crds", "examples", "evaluations"),
    *("requirements", ".github", ".ci"),
)
SUFFIXES = {".md", ".py", ".pyi", ".yaml", ".yml", ".toml", ".txt", ".tpl", ".sh", ".ts", ".tsx", ".json"}
GENERATED = {"node_modules", "build", "__pycache__"}
RECORDS_MAX = 50
SECTIONS = ("Context", "Decision", "Consequences", "Rejected alternatives", "Measurements")
"""Titles of a record's sections, in this order. The first two are required."""
MADE_UP = "0002-x.md"
"""A name that the tests of the documentation site use."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name[:4])
def test_decision_has_the_header_form(record: Path) -> None:
    header = _read_header(record)
    assert int(header["number"]) == int(record.name[:4])
    assert header["first"] <= header["last"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name[:4])
def test_decision_has_the_sections_in_order(record: Path) -> None:
    titles = re.findall(r"^## (.+)$", record.read_text(), re.MULTILINE)
    assert titles == [title for title in SECTIONS if title in titles]
    assert titles[:2] == list(SECTIONS[:2])


def test_number_of_decision_records_is_limited() -> None:
    assert len(RECORDS) <= RECORDS_MAX, "add the decision to the record of its topic, or merge two records"


def test_decision_index_matches_all_records() -> None:
    rows = ROW.findall(_index())
    listed = {name: (int(number), title, status, first, last) for number, title, name, status, first, last in rows}
    assert sorted(listed) == [record.name for record in RECORDS]
    assert len(rows) == len(RECORDS)
    for record in RECORDS:
        header = _read_header(record)
        expected = (int(header["number"]), *(header[name] for name in ("title", "status", "first", "last")))
        assert listed[record.name] == expected


def test_index_lists_each_superseded_number_once_with_its_record() -> None:
    listed = {int(number): re.findall(r"\[(\d+)\]\((\S+\.md)\)", links) for number, links in FORMER.findall(_index())}
    assert len(listed) == len(FORMER.findall(_index()))
    assert {number: links[0][1] for number, links in listed.items()} == {
        int(number): record.name
        for record in RECORDS
        for number in re.findall(r"\d+", _read_header(record)["supersedes"])
    }
    files = {(str(int(record.name[:4])), record.name) for record in RECORDS}
    assert {link for links in listed.values() for link in links} <= files
    assert not listed.keys() & {int(number) for number, _ in files}


def test_each_cited_number_resolves_by_the_index() -> None:
    known = _list_numbers()
    unknown = {
        (place, number) for place, text in _read_texts() for number in _list_citations(text) if number not in known
    }
    assert unknown == set()


def test_each_linked_record_exists() -> None:
    files, known = {record.name for record in RECORDS}, _list_numbers()
    dead = {
        (place, name)
        for place, text in _read_texts()
        for name in LINK.findall(text)
        if name != MADE_UP and (name not in files if name.endswith(".md") else int(name) not in known)
    }
    assert dead == set()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("see decision 51.", [51]),
        ("decisions 27 and 37, both", [27, 37]),
        ("([decision 11](decisions/0011-x.md))", [11]),
        ("Decision [76](0076-x.md)", [76]),
        ("# of a decision\n# 12 names it", [12]),
        ("a decision of 2 rules", []),
    ],
)
def test_citation_of_decisions_is_recognized(text: str, numbers: list[int]) -> None:
    assert list(_list_citations(text)) == numbers


def _index() -> str:
    return (FOLDER / "README.md").read_text()


def _read_header(record: Path) -> re.Match[str]:
    """Return the matched header of a record, whose second paragraph may be wrapped."""
    title, status = record.read_text().split("\n\n")[:2]
    header = HEADER.fullmatch(f"{title}\n\n{' '.join(status.split())}\n")
    assert header is not None, (
        "number and title, then `Status: ... First decision: ... Last decision: ... Supersedes: ...`"
    )
    return header


def _list_numbers() -> set[int]:
    """Return the numbers of the index: records, and former numbers with the records that have their text."""
    return {int(number) for number, *_ in ROW.findall(_index()) + FORMER.findall(_index())}


def _list_citations(text: str) -> Iterator[int]:
    for found in CITATION.findall(text):
        yield from map(int, re.findall(r"\d+", found))


def _read_texts() -> Iterator[tuple[str, str]]:
    """Return path and text of all source files and pages of the repository, except this file."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    for path in files:
        if path != Path(__file__) and not GENERATED & set(path.relative_to(ROOT).parts):
            yield str(path.relative_to(ROOT)), path.read_text(errors="replace")
