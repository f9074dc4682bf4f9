"""Number of engines by the run's load. Pure.

With n engines the engines' work of a step takes (work / n), and the trainer's a time of its own; the longer of both is the step's. So:

- The trainer waits for a share w of the time, and the engines have requests for a share b of it: n b (1 - target) / (1 - w) engines that
  have requests all the time would make it wait for the target share. Where it waits for something else (a slow environment, the last
  long answer, taking turns), b is low, and more engines are of no use.
- It does not wait, and the engines have no request for a share i of the time: n (1 - i) would be busy all the time. The number falls to
  what has that work with `FULL` of its time.

Between both lies a band of 1 / (FULL (1 - target)), about a quarter, in which nothing changes: the number does not swing. Each window of
measurement begins with the number that it measures, so that a choice is never made twice on what was before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlrun.protocol.messages.engine_load import EngineLoad

FULL = 0.85
"""Share of their time that engines are to have work, at most, after their number has fallen."""
KV_FULL = 0.9
"""Use of the KV cache that fewer engines may not come to."""
QUEUED = 0.1
"""Requests that wait, relative to those in flight, from which engines are full and their number does not fall."""
LEAST_STEPS = 2
"""Steps of a window: one may be an exception."""
_MOST_WAITED = 0.99
_CLOSE = 1e-9
"""Shares are quotients of floats."""


@dataclass(frozen=True)
class Rules:
    """Settings of a run.

    Attributes:
        least: number of engines that there are always.
        most: number that there may be.
        target_wait: share of the time that the trainer may wait for rollouts.
        stabilization_seconds: shortest window that is decided on.
    """

    least: int
    most: int
    target_wait: float
    stabilization_seconds: float


@dataclass(frozen=True)
class Choice:
    """Number of engines, and the reason for a change; empty: nothing changes."""

    engines: int
    why: str = ""


def choose_engines(wanted: int, load: EngineLoad | None, rules: Rules) -> Choice:
    """The number of engines that is wanted from now on.

    Args:
        wanted: the number that was wanted until now.
        load: measured by the run; None: the run is silent, or has measured nothing yet.
        rules: of the run.
    """
    within = min(max(wanted, rules.least), rules.most)
    if within != wanted:
        return Choice(within, f"autoscale is from {rules.least} to {rules.most}")
    if load is None or load.steps < LEAST_STEPS or load.seconds < rules.stabilization_seconds:
        return Choice(wanted)
    if load.engines > wanted:
        return Choice(wanted)  # those that are to go are still there
    if load.waited > rules.target_wait:
        more = min(_engines_to_add(load, rules.target_wait), rules.most) if load.engines == wanted else wanted
        return Choice(more, _describe_waiting_trainer(load, rules)) if more > wanted else Choice(wanted)
    if load.waited <= rules.target_wait / 2:
        fewer = max(_engines_to_keep(load), rules.least)
        return Choice(fewer, _describe_idle_engines(load)) if fewer < load.engines else Choice(wanted)
    return Choice(wanted)


def _engines_to_add(load: EngineLoad, target: float) -> int:
    """Engines with which the trainer waits for the target share; at most twice as many, and none that would have no request."""
    n = load.engines
    needed = math.ceil(n * load.busy * (1 - target) / (1 - min(load.waited, _MOST_WAITED)) - _CLOSE)
    useful = math.floor(n * (load.requests + load.waiting) + _CLOSE)
    return min(needed, 2 * n, useful)


def _engines_to_keep(load: EngineLoad) -> int:
    """Engines that would have the same work, with room in their KV caches; at least half as many."""
    n = load.engines
    if load.waiting > QUEUED * load.requests:
        return n
    busy = math.ceil(n * (1 - load.idle) / FULL - _CLOSE)
    holds = math.ceil(n * load.kv / KV_FULL - _CLOSE)
    return max(busy, holds, math.ceil(n / 2), 1)


def _describe_waiting_trainer(load: EngineLoad, rules: Rules) -> str:
    return (
        f"with {load.engines} engines the trainer waited for rollouts {load.waited:.0%} of {load.seconds:.0f} s "
        f"(target {rules.target_wait:.0%})"
    )


def _describe_idle_engines(load: EngineLoad) -> str:
    return (
        f"{load.engines} engines had no request for {load.idle:.0%} of {load.seconds:.0f} s, and the trainer waited for "
        f"rollouts {load.waited:.0%}"
    )
