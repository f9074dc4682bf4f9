"""Number of engines by the run's load. Pure.

With n engines, the engines need (work / n) for a step, and the trainer needs a fixed time; the step takes the longer of both:

- The trainer waits for a share w of the time, and the engines have requests for a share b: with n b (1 - target) / (1 - w) engines that
  always have requests it waits for the target share. If it waits for something else (a slow environment, the last long answer, alternating
  phases), b is low, and more engines do not help.
- The trainer does not wait, and the engines have no request for a share i of the time: n (1 - i) engines would always be busy. The number
  falls to the engines that need `FULL` of their time for this work.

Between both is a band of 1 / (FULL (1 - target)), about a quarter, without changes, so that the number does not oscillate. Each window of
measurement starts with a change of the number, so that one measurement never causes two choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlrun.protocol.messages.engine_load import EngineLoad

FULL = 0.85
"""Maximum busy share of engines after their number has fallen."""
KV_FULL = 0.9
"""Maximum use of the KV cache after the number of engines has fallen."""
QUEUED = 0.1
"""Ratio of waiting requests to requests in flight above which the number of engines does not fall."""
LEAST_STEPS = 2
"""Minimum number of steps in a window, because one step may be an exception."""
_MOST_WAITED = 0.99
_CLOSE = 1e-9
"""Tolerance for shares, which are quotients of floats."""


@dataclass(frozen=True)
class Rules:
    """Settings of a run.

    Attributes:
        least: minimum number of engines.
        most: maximum number of engines.
        target_wait: share of the time for which the trainer may wait for rollouts.
        stabilization_seconds: minimum length of the window of measurement.
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
    """Return the new number of engines.

    Args:
        wanted: current number.
        load: measured load; None if the run is silent, or has no measurement yet.
        rules: settings of the run.
    """
    within = min(max(wanted, rules.least), rules.most)
    if within != wanted:
        return Choice(within, f"autoscale is from {rules.least} to {rules.most}")
    if load is None or load.steps < LEAST_STEPS or load.seconds < rules.stabilization_seconds:
        return Choice(wanted)
    if load.engines > wanted:
        return Choice(wanted)  # drained engines still exist
    if load.waited > rules.target_wait:
        more = min(_engines_to_add(load, rules.target_wait), rules.most) if load.engines == wanted else wanted
        return Choice(more, _describe_waiting_trainer(load, rules)) if more > wanted else Choice(wanted)
    if load.waited <= rules.target_wait / 2:
        fewer = max(_engines_to_keep(load), rules.least)
        return Choice(fewer, _describe_idle_engines(load)) if fewer < load.engines else Choice(wanted)
    return Choice(wanted)


def _engines_to_add(load: EngineLoad, target: float) -> int:
    """Return the number of engines with which the trainer waits for the target share; at most twice as many, and none without requests."""
    n = load.engines
    needed = math.ceil(n * load.busy * (1 - target) / (1 - min(load.waited, _MOST_WAITED)) - _CLOSE)
    useful = math.floor(n * (load.requests + load.waiting) + _CLOSE)
    return min(needed, 2 * n, useful)


def _engines_to_keep(load: EngineLoad) -> int:
    """Return the number of engines that can do the same work with room in their KV caches; at least half as many."""
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
