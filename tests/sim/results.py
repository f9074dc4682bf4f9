"""Committed figures of the simulation: one section for each part, updated separately."""

from __future__ import annotations

import datetime
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "simulation.md"
HEAD = """# A simulated cluster around the real operator

`make test-full` writes this page: `python -m tests.sim --write`, with `--histories`, `--elastic`, `--engines`, `--queued`,
`--planted`, `--fuzz` or `--day`.
"""


def keep(title: str, text: str, path: Path = RESULTS) -> None:
    """Write `text` below the heading `title` in place of the old text; other sections stay unchanged."""
    before = path.read_text() if path.exists() else HEAD
    head, *parts = before.split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    gap = "\n\n" if text.lstrip().startswith("|") else " "
    sections[title] = f"\nOn {datetime.datetime.now(datetime.UTC):%Y-%m-%d}.{gap}{text.strip()}\n"
    path.write_text(
        head.rstrip() + "\n" + "".join(f"\n## {name}\n\n{body.strip()}\n" for name, body in sections.items())
    )
