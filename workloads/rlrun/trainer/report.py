"""A trained step in words and as a line of `metrics.jsonl`: both are for people, and training goes on without them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from loguru import logger


def summary(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """The log's line.

    Args:
        step: that was trained.
        max_steps: of the run.
        metrics: of the step, by their names in `metrics.jsonl`.
    """
    return (
        f"step {step}/{max_steps}: loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}, "
        f"lr {metrics['lr']:.3g}, {metrics['perf/throughput']:.0f} tokens/s, step {metrics['time/step']:.2f} s, "
        f"waited {metrics['time/wait_for_batch']:.2f} s"
    )


def append(path: Path, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
    """Add a line, where no orchestrator does so. What is not finite is left out.

    Args:
        path: of `metrics.jsonl`.
        step: that was trained.
        attempt: by which.
        metrics: of the step.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    line = json.dumps({"step": step, "attempt": attempt, **finite})
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning(f"{path} misses step {step}: {error}")
