"""A line of a run's `metrics.jsonl`, which the orchestrator writes and everything that shows a run reads."""

from __future__ import annotations

FURTHEST = "furthest_step"
"""In the line of a step that was trained before, and lost by a restart: the highest step that was."""
MetricsLine = dict[str, float]
"""A step's metrics by name, with `step`, `attempt` and `time`."""
