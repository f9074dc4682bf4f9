"""The measures of policies side by side, as `results.json` holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.table import Table

RESULTS = "results.json"
"""File in the folder of the answers."""
_WIDTH = 160
"""Columns of a table that is written into a file or pipe."""


def print_measures(console: Console, folder: Path) -> None:
    """Print the table of a run's folder, and where it comes from."""
    path = folder / RESULTS
    wide = console if console.is_terminal else Console(file=console.file, width=_WIDTH)
    wide.print(measures_table(json.loads(path.read_text())))
    console.print(f"all of it: {path}", highlight=False, soft_wrap=True)


class Measure(TypedDict):
    """Measures of one policy in one environment."""

    environment: str
    policy: str
    step: int | None
    tasks: int
    answers: int
    metrics: dict[str, float]
    """Named as in `metrics.jsonl` after `eval/<env>/`."""
    files: list[str]
    """Files of the answers, below the document's folder."""


class Measures(TypedDict):
    """Content of `results.json`."""

    run: str
    split: str
    num_tasks: int
    samples_per_task: int
    results: list[Measure]


def measures_table(document: Measures) -> Table:
    """The document's measures side by side; environments one after the other, policies in order of step."""
    rows = document["results"]
    names = [name for row in rows for name in row["metrics"]]
    passes = sorted({name for name in names if name.startswith("pass@")}, key=lambda name: int(name[5:]))
    drawn = Table(title=f"{document['run']}, {document['split']} tasks", title_justify="left")
    drawn.add_column("environment")
    drawn.add_column("policy")
    average = f"avg@{document['samples_per_task']}"
    for column in ("tasks", average, *passes, "tokens", "truncated", "errors"):
        drawn.add_column(column, justify="right")
    columns = {
        "reward/mean": ".4f",
        **dict.fromkeys(passes, ".4f"),
        "completion_length/mean": ".1f",
        "truncated": ".2f",
    }
    for row in sorted(rows, key=lambda row: str(row["environment"])):
        metrics = row["metrics"]
        shown = [f"{metrics[name]:{form}}" if name in metrics else "–" for name, form in columns.items()]
        drawn.add_row(row["environment"], row["policy"], str(row["tasks"]), *shown, f"{metrics.get('errors', 0):.0f}")
    return drawn
