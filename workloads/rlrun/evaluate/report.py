"""Results of an evaluation: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlrun.config.models.rollout import solved_rewards
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Part
from rlrun.local.summary import RESULTS, Measure, Measures
from rlrun.orchestrator.evaluation.evaluator import evaluation_metrics

_MISSING = {"errors": "failed", "timeouts": "late"}


def results_document(plan: Plan, parts: Sequence[Part]) -> Measures:
    """Return the results: settings, and the metrics of every policy and environment, named as in `metrics.jsonl` after
    `eval/<env>/`.
    """
    settings = plan.evaluation
    return {
        "run": plan.name,
        "split": plan.split,
        "num_tasks": settings.num_tasks,
        "samples_per_task": settings.samples_per_task,
        "results": [_policy_result(plan, part) for part in parts],
    }


def _policy_result(plan: Plan, part: Part) -> Measure:
    answers = part.answers()
    prefix = f"eval/{part.environment}/"
    metrics = evaluation_metrics(answers, solved_rewards(plan.orchestrator.environments))
    measured = {key.removeprefix(prefix): value for key, value in metrics.items()}
    return {
        "environment": part.environment,
        "policy": part.policy.name,
        "step": part.policy.step,
        "tasks": len({question.task for question in part.wanted}),
        "answers": sum(answer.rollout is not None for answer in answers),
        "metrics": measured,
        "files": [str(file.relative_to(plan.work)) for file in part.file.files],
    }


def short_lines(document: Measures) -> list[str]:
    """Return one line per policy and environment, such as `gsm8k, step 20: avg@4 0.4120, pass@4 0.7100`."""
    lines = []
    for row in document["results"]:
        metrics, average = row["metrics"], f"avg@{document['samples_per_task']}"
        named = {average: metrics.get("reward/mean")}
        missing = [f"{metrics[name]:.0f} {word}" for name, word in _MISSING.items() if metrics.get(name)]
        if missing and metrics.get("answers"):
            named["with the rest as 0"] = metrics.get("reward/mean_all")
        named |= {k: v for k, v in metrics.items() if k.startswith("pass@")}
        values = ", ".join(f"{name} {value:.4f}" for name, value in named.items() if value is not None)
        lines.append(f"{row['environment']}, {row['policy']}: {', '.join([values or 'no answers', *missing])}")
    return lines


def unanswered_lines(parts: Sequence[Part]) -> list[str]:
    """Return one line per policy and environment with unanswered questions, with the first reason."""
    lines = []
    for part in parts:
        failed = len(part.left)
        if failed:
            reason = part.file.first_error() or "it was not requested"
            lines.append(
                f"{part.policy.name}, {part.environment}: {failed} of {len(part.wanted)} answers failed; the first: {reason}"
            )
    return lines


def nothing_answered(parts: Sequence[Part]) -> bool:
    """Return whether some policy has no answer in some environment."""
    return any(len(part.left) == len(part.wanted) for part in parts)


def write_path(work: Path) -> Path:
    """Return the path of the results."""
    return work / RESULTS
