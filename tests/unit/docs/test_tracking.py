"""The tracker page lists all names of the code."""

from __future__ import annotations

from pathlib import Path

from rlrun.tracking.tracker_records import DERIVED, NAMES, PATTERNS

PAGE = Path(__file__).parents[3] / "docs" / "tracking.md"


def test_tracking_page_contains_all_names() -> None:
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name, (tracked, _) in NAMES.items():
        assert any(row.startswith(f"| `{name}` | `{tracked}`") for row in rows), name
    for pattern, layout in PATTERNS:
        name = pattern.replace("(?P<env>.+)", "<environment>")
        assert f"| `{name}` | `{layout.replace('{env}', '<environment>')}` |" in rows, name
    assert all(f"`{name}`" in text for name in DERIVED)
