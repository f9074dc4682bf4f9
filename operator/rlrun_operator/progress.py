"""How far the run is: what the orchestrator wrote on its Lease, made into the status."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rlrun.api.status import CheckpointStatus, ProgressStatus, RLRunStatus
from rlrun.protocol import annotations as keys
from rlrun_operator.state import Manifest
from rlrun_operator.times import rfc3339

HEARTBEAT_SECONDS = 60.0
"""A Lease that has not changed for this long is stale; the orchestrator renews it at least every 15 s."""
_DIGITS = 4
"""Significant digits of measured values: more would change the status without telling more."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Report:
    """One reading of the progress Lease; None: not known."""

    attempt: int
    step: int | None
    policy_version: int | None
    checkpoint_step: int | None
    resumed_from_step: int | None
    reward: float | None
    tokens_per_second: float | None
    staleness_mean: float | None
    eta_seconds: float | None
    waiting_on: str | None
    total_steps: int | None = None
    """Fewer than `maxSteps` where the data of supervised fine-tuning ends before."""


def read_lease(lease: Manifest | None, attempt: int) -> Report | None:
    """What the Lease says of `attempt`; None while it speaks of another one, or not at all."""
    found: Mapping[str, str] = ((lease or {}).get("metadata") or {}).get("annotations") or {}
    if _number(found, keys.ATTEMPT, int) != attempt:
        return None
    return Report(
        attempt=attempt,
        step=_number(found, keys.STEP, int),
        policy_version=_number(found, keys.POLICY_VERSION, int),
        checkpoint_step=_number(found, keys.CHECKPOINT_STEP, int),
        resumed_from_step=_number(found, keys.RESUMED_FROM_STEP, int),
        reward=_measured(found, keys.REWARD),
        tokens_per_second=_measured(found, keys.TOKENS_PER_SECOND),
        staleness_mean=_measured(found, keys.STALENESS_MEAN),
        eta_seconds=_number(found, keys.ETA_SECONDS, float),
        waiting_on=found.get(keys.WAITING_ON) or None,
        total_steps=_number(found, keys.TOTAL_STEPS, int),
    )


def is_training(report: Report | None) -> bool:
    """Whether the attempt has trained a step of its own."""
    return report is not None and report.step is not None and report.step > (report.resumed_from_step or 0)


def progressed(past: RLRunStatus, report: Report | None, total: int, now: float) -> ProgressStatus:
    """The status' progress after `report`; without one what is known stays."""
    if report is None or report.step is None:
        waiting = report.waiting_on if report is not None else None
        return past.progress.model_copy(
            update={"total_steps": total, "waiting_on": waiting or past.progress.waiting_on}
        )
    total = min(total, report.total_steps or total)
    last, estimate = past.progress.last_step_time, past.progress.estimated_completion_time
    if report.step != past.progress.step or last is None:
        last = rfc3339(now) if is_training(report) else None
        estimate = rfc3339(now + report.eta_seconds) if report.eta_seconds is not None else None
    return ProgressStatus(
        step=report.step,
        total_steps=total,
        percent=min(100, 100 * report.step // total) if total else 0,
        policy_version=report.policy_version,
        reward=report.reward,
        tokens_per_second=report.tokens_per_second,
        staleness_mean=report.staleness_mean,
        last_step_time=last,
        estimated_completion_time=estimate,
        waiting_on=report.waiting_on,
    )


def checkpointed(past: RLRunStatus, report: Report | None, now: float) -> CheckpointStatus:
    """The status' checkpoint after `report`.

    The first report of an attempt that knows where it started says how many steps are lost. `resumedFromStep` is absent from the
    beginning of an attempt until then, and `past.progress` is of the attempt before, so that they are counted once.
    """
    old = past.checkpoint
    if report is None or report.step is None:
        return old
    resumed, lost = old.resumed_from_step, old.steps_lost_total
    if resumed is None:
        resumed = report.resumed_from_step or 0
        lost += max(0, past.progress.step - resumed)
    newest, when = old.latest_complete_step, old.latest_complete_time
    if report.checkpoint_step is not None and report.checkpoint_step != newest:
        newest, when = report.checkpoint_step, rfc3339(now)
    return CheckpointStatus(
        latest_complete_step=newest, latest_complete_time=when, resumed_from_step=resumed, steps_lost_total=lost
    )


def silent_for(lease_changed_at: float | None, now: float) -> float:
    """Seconds since the operator saw the Lease change; 0 while it has not watched it yet."""
    return max(0.0, now - lease_changed_at) if lease_changed_at is not None else 0.0


def _number(found: Mapping[str, str], key: str, kind: Callable[[str], _T]) -> _T | None:
    try:
        value = kind(found[key])
    except (KeyError, ValueError, TypeError):
        return None
    return value if math.isfinite(value) else None  # type: ignore[arg-type]


def _measured(found: Mapping[str, str], key: str) -> float | None:
    value = _number(found, key, float)
    return float(f"{value:.{_DIGITS}g}") if value is not None else None
