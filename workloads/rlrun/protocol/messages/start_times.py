"""Seconds of a trainer's start by phase: from the metrics of an attempt's first step, through the progress Lease, to the run's status.

Each is a duration by one process's steady clock, so that clocks of two machines are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

PREFIX = "time/start_"
"""Prefix of the metrics' names, before the phase."""
MEASURED = ("imports", "group", "base", "model", "checkpoint", "publish")
"""Phases that rank 0 measures, in order: torchrun and the rank import packages; the ranks meet; the base checkpoint is chosen and checked;
the model is sharded (and read, if no checkpoint has the weights); the checkpoint is read; the base version is published."""
PHASES = (*MEASURED, "batch", "step")
"""All phases up to the first new step: in addition to the measured ones, the wait for its batch, and the step itself with compilation."""
OBSERVED = ("ending", "waiting", "scheduling", "containers")
"""Phases of a restart that the operator observes, in order: until the old pods are gone, the next attempt starts, all of its pods have
nodes, and all of their containers run."""
OTHER = "other"
"""Remainder of a restart: waits between pods, and delays of reports."""
RESTART_PHASES = (*OBSERVED, *PHASES, OTHER)
"""All phases of a restart, in the order of `status.lastRestart`."""
SECONDS_MAX = 30 * 86400.0
"""Maximum of a valid measurement."""


def start_times(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Return seconds by phase from the metrics of an attempt's first step, or None if a later step or an old trainer wrote them.

    Args:
        metrics: metrics of a step, by their names in `metrics.jsonl`.
    """
    found = {name: metrics[PREFIX + name] for name in MEASURED if PREFIX + name in metrics}
    if not found:
        return None
    wait = metrics.get("time/wait_for_batch", 0.0)
    found["batch"], found["step"] = wait, metrics.get("time/step", wait) - wait
    return _valid_durations(found)


def start_text(seconds: Mapping[str, float]) -> str:
    """Return the text of an annotation."""
    return json.dumps({name: round(value, 1) for name, value in seconds.items()}, separators=(",", ":"))


def parse_start(text: str | None) -> dict[str, float]:
    """Return seconds by phase from an annotation; any client may have written it, so invalid durations are dropped."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return _valid_durations(found) if isinstance(found, dict) else {}


def _valid_durations(found: Mapping[str, object]) -> dict[str, float]:
    """Return the durations of known phases, in order; a negative one, after a clock was set back, becomes zero."""
    sound: dict[str, float] = {}
    for name in PHASES:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= SECONDS_MAX:
            sound[name] = max(0.0, float(value))
    return sound
