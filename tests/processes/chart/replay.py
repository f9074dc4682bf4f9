"""One line of `metrics.jsonl` of a run on a GPU."""

from __future__ import annotations

STEP_METRICS = {
    "loss": 0.012,
    "grad_norm": 0.8,
    "lr": 1e-6,
    "entropy": 0.31,
    "mismatch_kl": 4e-4,
    "reward/mean": 0.52,
    "reward/arithmetic/mean": 0.52,
    "off_policy/mean": 1.2,
    "completion_length/mean": 212.0,
    "batch/truncated": 0.02,
    "batch/solve_none": 0.21,
    "perf/mfu": 0.38,
    "perf/throughput": 21000.0,
    "time/step": 9.0,
    "time/wait_for_batch": 2.0,
}
"""Metric values by name."""
