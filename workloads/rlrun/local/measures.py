"""Results of several policies side by side, as stored in `results.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.table import Table

RESULTS = "results.json"
"""File in the folder of the answers."""
_WIDTH = 160
"""Width of a table in a file or pipe, in characters."""


def print_measures(console: Console, folder: Path) -> None:
    """Print the table of a run's folder and the path of its file."""
    path = folder / RESULTS
    wide = console if console.is_terminal else Console(file=console.file, width=_WIDTH)
    wide.print(measures_table(json.loads(path.read_text())))
    console.print(f"all results: {path}", highlight=False, soft_wrap=True)


class Measure(TypedDict):
    """Results of one policy in one environment."""

    environment: str
    policy: str
    step: int | None
    tasks: int
    answers: int
    metrics: dict[str, float]
    """Metrics by their names in `metrics.jsonl` after `eval/<env>/`."""
    files: list[str]
    """Files of the answers, relative to the document's folder."""


class Measures(TypedDict):
    """Content of `results.json`."""

    run: str
    split: str
    num_tasks: int
    samples_per_task: int
    results: list[Measure]


def measures_table(document: Measures) -> Table:
    """Return a table of the results, ordered by environment and step."""
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
