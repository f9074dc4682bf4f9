"""A line of a run's `metrics.jsonl`, which the orchestrator writes and everything that shows a run reads."""

from __future__ import annotations

from collections.abc import Mapping

FURTHEST = "furthest_step"
"""In the line of a step that was trained before, and lost by a restart: the highest step that was."""
MetricsLine = dict[str, float]
"""A step's metrics by name, with `step`, `attempt` and `time`."""


def missing_answers(line: Mapping[str, float], prefix: str) -> str:
    """Note that belongs to a held-out mean of which answers are missing, such as ` (partial: 4 of 6 answers in time, ...)`; else empty.

    Args:
        line: metrics.
        prefix: of the evaluation's names, such as `eval/gsm8k/`.
    """
    done, late, failed = (line.get(prefix + name) or 0 for name in ("answers", "timeouts", "errors"))
    if not late and not failed:
        return ""
    of_all = line.get(prefix + "reward/mean_all")
    known = [f"{failed:.0f} failed"] * bool(failed) + [f"{of_all:.3f} with the rest as 0"] * (of_all is not None)
    return f" (partial: {', '.join([f'{done:.0f} of {done + late + failed:.0f} answers in time', *known])})"
