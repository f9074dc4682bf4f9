"""Prose of the pages has lines of at most 100 columns; tables, code, headings, links and generated pages may be longer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COLUMNS_MAX = 100
WIDE = ("|", "#", "![", "<", ">", "```")
"""Starts of lines that may be wider: tables, headings, pictures, HTML, quoted output, code."""
UNBREAKABLE = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
"""Code and links, which a line keeps whole."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]


def long_lines(text: str) -> Iterator[str]:
    """Lines of prose that are too long and have more than one word that a line break may separate."""
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code or len(line) <= COLUMNS_MAX or line.lstrip().startswith(WIDE):
            continue
        words = UNBREAKABLE.sub("x", line).removeprefix("- ").split()
        if len(words) > 1:
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_of_page_fits_the_columns(page: Path) -> None:
    assert list(long_lines(page.read_text())) == []


def test_long_line_of_prose_is_found_outside_of_code_and_tables() -> None:
    prose, code = "word " * 30, "```\n" + "code " * 30 + "\n```"
    assert list(long_lines(f"{prose}\n{code}\n| {prose} |\n## {prose}")) == [prose]
