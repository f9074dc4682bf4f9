"""Prose lines of pages have at most 100 columns, except tables, code, headings, links and generated pages."""

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
"""Code and links, which are not wrapped."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]


def long_lines(text: str) -> Iterator[str]:
    """Return the prose lines that are too long and contain more than one separable word."""
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
    found = list(long_lines(page.read_text()))
    assert not found, f"wrap these lines of {page.name} at {COLUMNS_MAX} characters: {found}"


def test_long_prose_line_is_found_outside_code_and_tables() -> None:
    prose, code = "word " * 30, "```\n" + "code " * 30 + "\n```"
    assert list(long_lines(f"{prose}\n{code}\n| {prose} |\n## {prose}")) == [prose]
