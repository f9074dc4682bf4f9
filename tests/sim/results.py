"""The committed figures of the simulation: one section for each of its parts, written anew by itself."""

from __future__ import annotations

import datetime
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "simulation.md"
HEAD = """# A simulated cluster around the real operator

`make test-full` writes this page: `python -m tests.sim --write`, with `--histories`, `--elastic`, `--engines`, `--queued`,
`--planted`, `--fuzz` or `--day`.
"""


def keep(title: str, text: str, path: Path = RESULTS) -> None:
    """Put `text` below the heading `title`, in the place of what was there; other sections stay as they are."""
    before = path.read_text() if path.exists() else HEAD
    head, *parts = before.split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    gap = "\n\n" if text.lstrip().startswith("|") else " "
    sections[title] = f"\nOn {datetime.datetime.now(datetime.UTC):%Y-%m-%d}.{gap}{text.strip()}\n"
    path.write_text(
        head.rstrip() + "\n" + "".join(f"\n## {name}\n\n{body.strip()}\n" for name, body in sections.items())
    )
