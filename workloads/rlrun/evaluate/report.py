"""What an evaluation has found: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rlrun.evaluate.job import Job
from rlrun.evaluate.play import Part
from rlrun.orchestrator.evaluation import evaluation_metrics


def results(job: Job, parts: Sequence[Part]) -> dict[str, Any]:
    """The document: what was asked, and the measures of every policy and environment, named as in `metrics.jsonl` after `eval/<env>/`."""
    settings = job.evaluation
    return {
        "run": job.name,
        "split": job.split,
        "num_tasks": settings.num_tasks,
        "samples_per_task": settings.samples_per_task,
        "results": [_result(job, part) for part in parts],
    }


def _result(job: Job, part: Part) -> dict[str, Any]:
    answers = part.answers()
    prefix = f"eval/{part.environment}/"
    measured = {key.removeprefix(prefix): value for key, value in evaluation_metrics(answers).items()}
    return {
        "environment": part.environment,
        "policy": part.policy.name,
        "step": part.policy.step,
        "tasks": len({question.task for question in part.wanted}),
        "answers": sum(answer.rollout is not None for answer in answers),
        "metrics": measured,
        "file": str(part.file.path.relative_to(job.work)),
    }


def table(document: dict[str, Any]) -> Table:
    """The document's measures side by side; environments one after the other, policies in order of step."""
    rows: list[dict[str, Any]] = document["results"]
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


def unanswered(parts: Sequence[Part]) -> list[str]:
    """What was asked and never answered, a line per policy and environment, with the first reason."""
    lines = []
    for part in parts:
        failed = len(part.file.missing(part.wanted))
        if failed:
            reason = part.file.first_error() or "it was not asked"
            lines.append(
                f"{part.policy.name}, {part.environment}: {failed} of {len(part.wanted)} answers failed; the first: {reason}"
            )
    return lines


def nothing_answered(parts: Sequence[Part]) -> bool:
    """Whether some policy has no answer at all in some environment."""
    return any(len(part.file.missing(part.wanted)) == len(part.wanted) for part in parts)


def write_path(work: Path) -> Path:
    """Where the document is written."""
    return work / "results.json"
