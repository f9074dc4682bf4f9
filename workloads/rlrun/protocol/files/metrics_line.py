"""A line of a run's `metrics.jsonl`, which the orchestrator writes and everything that shows a run reads."""

from __future__ import annotations

MetricsLine = dict[str, float]
"""A step's metrics by name, with `step`, `attempt` and `time`."""
