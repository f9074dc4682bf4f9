"""Seconds of a trainer's start by phase: from its metrics of an attempt's first step, over the progress Lease, to the run's status.

Each is a duration by one process's steady clock, so that no two machines' clocks are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

PREFIX = "time/start_"
"""Beginning of the metrics' names; the phase follows."""
MEASURED = ("imports", "group", "base", "model", "checkpoint", "publish")
"""Phases that rank 0 measures, in order: torchrun and the rank have imported what they need; the ranks have met; the base checkpoint is
chosen and checked; the model is divided (and read, where no checkpoint holds the weights); the checkpoint is read; the base version is
published."""
PHASES = (*MEASURED, "batch", "step")
"""All phases up to the first new step: beside the measured ones the wait for its batch, and the step itself, compilation included."""
OBSERVED = ("ending", "waiting", "scheduling", "containers")
"""Phases of a restart that the operator observes, in order: until the old pods are gone, the next attempt begins, all of its pods have
nodes, and all of their containers run."""
OTHER = "other"
"""Rest of a restart: what pods wait for each other, and what is told later than it happens."""
RESTART_PHASES = (*OBSERVED, *PHASES, OTHER)
"""All phases of a restart, in order, as in `status.lastRestart`."""
SECONDS_MAX = 30 * 86400.0
"""A longer phase is no measurement."""


def start_times(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Seconds by phase, of an attempt's first step; None: the metrics are of a later one, or of a trainer that measures none.

    Args:
        metrics: of a step, by their names in `metrics.jsonl`.
    """
    found = {name: metrics[PREFIX + name] for name in MEASURED if PREFIX + name in metrics}
    if not found:
        return None
    wait = metrics.get("time/wait_for_batch", 0.0)
    found["batch"], found["step"] = wait, metrics.get("time/step", wait) - wait
    return _valid_durations(found)


def start_text(seconds: Mapping[str, float]) -> str:
    """Text of an annotation."""
    return json.dumps({name: round(value, 1) for name, value in seconds.items()}, separators=(",", ":"))


def parse_start(text: str | None) -> dict[str, float]:
    """Seconds by phase in the text of an annotation, which any client may have written; what is no duration is left out."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return _valid_durations(found) if isinstance(found, dict) else {}


def _valid_durations(found: Mapping[str, object]) -> dict[str, float]:
    """Durations of known phases, in order; one below zero, of a clock that was set back, is zero."""
    sound: dict[str, float] = {}
    for name in PHASES:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= SECONDS_MAX:
            sound[name] = max(0.0, float(value))
    return sound
