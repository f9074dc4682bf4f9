"""Progress of a run from the orchestrator's Lease, and the duration of its restarts by phase. Pure.

The orchestrator writes its values to the Lease, and the status fields are made from them.

The duration of a restart lasts from the observed end of an attempt to the first new step of the next one, in seconds. Each phase ends when
this operator first observes its end, by its own clock; phases inside the trainer are the trainer's own measurements. The phase `other` is
the remainder, so that the phases add up to the total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from rlrun.api.run_status import COUNT_MAX, CheckpointStatus, ProgressStatus, RestartStatus, RLRunStatus
from rlrun.protocol.messages import lease_annotations as keys
from rlrun.protocol.messages.lease_annotations import (
    OBSERVED,
    OTHER,
    PHASES,
    RESTART_PHASES,
    EngineLoad,
    parse_load,
    parse_start,
)
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import StatusChange
from rlrun_operator.times import format_rfc3339, seconds_of

HEARTBEAT_SECONDS = 3 * keys.RENEW_SECONDS
"""Age at which an unchanged Lease is stale: two renewals in a row are missing."""
LATE_SECONDS = 1.5 * keys.RENEW_SECONDS
"""Age at which one renewal of the Lease is missing: its content may be outdated."""
WAITING_ON_MAX = 1000
"""Characters."""
ETA_MAX = 10 * 365 * 86400.0
"""Seconds; a later end is not a useful estimate."""
_DIGITS = 4
"""Significant digits of measured values: more digits would change the status without new information."""


@dataclass(frozen=True)
class Report:
    """Content of the progress Lease; None means unknown."""

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
    """Number of steps: less than `maxSteps` if the data of supervised fine-tuning ends earlier; for Eval, the number of answers."""
    waiting_role: str | None = None
    """Role that the orchestrator waits for."""
    storage: tuple[str, str] | None = None
    """Reason and message while the volume is unusable."""
    results: tuple[str, ...] = ()
    """Results of the evaluated policies, one line each."""
    load: EngineLoad | None = None
    """Load of the engines over the last steps."""
    drained: tuple[str, ...] | None = None
    """Addresses of drained engines, which receive no more requests; None: the orchestrator cannot drain."""
    trained: tuple[int, int] | None = None
    """Trained tokens and samples of the run; None: none yet, or unknown."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each phase of the attempt's start took."""
    engines_wanted: int | None = None
    """Number of engines that the operator last asked the orchestrator to keep."""


def read_lease(lease: Manifest | None, attempt: int) -> Report | None:
    """Return the content of the Lease about `attempt`, or None while it is empty or about another attempt."""
    found: Mapping[str, str] = ((lease or {}).get("metadata") or {}).get("annotations") or {}
    if _read_count(found, keys.ATTEMPT) != attempt:
        return None
    return Report(
        attempt=attempt,
        step=_read_count(found, keys.STEP),
        policy_version=_read_count(found, keys.POLICY_VERSION),
        checkpoint_step=_read_count(found, keys.CHECKPOINT_STEP),
        resumed_from_step=_read_count(found, keys.RESUMED_FROM_STEP),
        reward=_measured_value(found, keys.REWARD),
        tokens_per_second=_measured_value(found, keys.TOKENS_PER_SECOND),
        staleness_mean=_measured_value(found, keys.STALENESS_MEAN),
        eta_seconds=_within_bound(_read_number(found, keys.ETA_SECONDS), ETA_MAX),
        waiting_on=found.get(keys.WAITING_ON, "")[:WAITING_ON_MAX] or None,
        total_steps=_read_count(found, keys.TOTAL_STEPS),
        waiting_role=found.get(keys.WAITING_ON_ROLE) or None,
        storage=_read_trouble(found.get(keys.STORAGE, "")),
        results=_read_lines(found.get(keys.RESULTS)),
        load=parse_load(found.get(keys.ENGINES)),
        drained=_read_words(found.get(keys.ENGINES_DRAINED)),
        trained=_read_trained(found.get(keys.TRAINED, "")),
        start=parse_start(found.get(keys.START_SECONDS)),
        engines_wanted=_read_count(found, keys.ENGINES_WANTED),
    )


def _read_trained(text: str) -> tuple[int, int] | None:
    """Return tokens and samples of an annotation; any client may have written it, so invalid text gives None."""
    match [int(word) for word in text.split() if word.isascii() and word.isdecimal() and len(word) <= 16]:
        case [int(tokens), int(samples)] if 0 < tokens <= COUNT_MAX and 0 < samples <= COUNT_MAX:
            return tokens, samples
    return None


def is_training(report: Report | None) -> bool:
    """Return whether the attempt has trained a step since its start."""
    return report is not None and report.step is not None and report.step > (report.resumed_from_step or 0)


class _Change(TypedDict, total=False):
    """Fields of ProgressStatus."""

    total_steps: int
    waiting_on: str | None
    estimated_completion_time: str | None
    tokens_per_second: float | None


def change_progress(progress: ProgressStatus, **change: Unpack[_Change]) -> ProgressStatus:
    """Return `progress` with new values of some fields."""
    return progress.model_copy(update=change)


def unresumed_checkpoint(checkpoint: CheckpointStatus) -> CheckpointStatus:
    """Return `checkpoint` for the start of an attempt: the step from which it resumes is not known yet."""
    return CheckpointStatus(
        latest_complete_step=checkpoint.latest_complete_step,
        latest_complete_time=checkpoint.latest_complete_time,
        steps_lost_total=checkpoint.steps_lost_total,
    )


def measured_fields(past: RLRunStatus, report: Report | None, total: int, now: float) -> StatusChange:
    """Return the new values of both progress and checkpoint."""
    return StatusChange(
        progress=progress_after(past, report, total, now), checkpoint=checkpoint_after(past, report, now)
    )


def progress_after(past: RLRunStatus, report: Report | None, total: int, now: float) -> ProgressStatus:
    """Return the progress after `report`; without a report, known values stay. `total` 0: use the report's number of steps."""
    if report is None or report.step is None:
        waiting = report.waiting_on if report is not None else None
        total = total or past.progress.total_steps
        return change_progress(past.progress, total_steps=total, waiting_on=waiting or past.progress.waiting_on)
    total = min(total or COUNT_MAX, report.total_steps or total)
    last, estimate = past.progress.last_step_time, past.progress.estimated_completion_time
    if report.step != past.progress.step or last is None:
        last = format_rfc3339(now) if is_training(report) else None
        estimate = format_rfc3339(now + report.eta_seconds) if report.eta_seconds is not None else None
    return ProgressStatus(
        step=report.step,
        total_steps=total,
        percent=min(100, 100 * report.step // total) if total else 0,
        furthest_step=max(past.progress.furthest_step, past.progress.step, report.step),
        policy_version=report.policy_version,
        reward=report.reward,
        tokens_per_second=report.tokens_per_second,
        staleness_mean=report.staleness_mean,
        last_step_time=last,
        estimated_completion_time=estimate,
        waiting_on=report.waiting_on,
    )


def checkpoint_after(past: RLRunStatus, report: Report | None, now: float) -> CheckpointStatus:
    """Return the checkpoint status after `report`.

    The first report of an attempt that contains its resume step determines how many steps were lost. Until then `resumedFromStep` is
    absent and `past.progress` still belongs to the previous attempt, so that lost steps are counted once.
    """
    old = past.checkpoint
    if report is None or report.step is None:
        return old
    resumed, lost = old.resumed_from_step, old.steps_lost_total
    if resumed is None:
        resumed = report.resumed_from_step or 0
        lost = min(lost + max(0, past.progress.step - resumed), COUNT_MAX)
    newest, when = old.latest_complete_step, old.latest_complete_time
    if newest is not None and old.resumed_from_step is None and resumed < newest:  # damaged or missing
        newest = when = None
    if report.checkpoint_step is not None and report.checkpoint_step != newest:
        newest, when = report.checkpoint_step, format_rfc3339(now)
    return CheckpointStatus(
        latest_complete_step=newest, latest_complete_time=when, resumed_from_step=resumed, steps_lost_total=lost
    )


def silent_for(lease_changed_at: float | None, now: float) -> float:
    """Return the seconds since the operator saw the Lease change, or 0 if it has not watched the Lease yet."""
    return max(0.0, now - lease_changed_at) if lease_changed_at is not None else 0.0


def _read_count(found: Mapping[str, str], key: str) -> int | None:
    """Return a whole number within the API's range, or None; any client may have written the annotation."""
    try:
        value = int(found[key])
    except (KeyError, ValueError, TypeError):
        return None
    return value if 0 <= value <= COUNT_MAX else None


def _read_number(found: Mapping[str, str], key: str) -> float | None:
    try:
        value = float(found[key])
    except (KeyError, ValueError, TypeError):
        return None
    return value if math.isfinite(value) else None


def _within_bound(value: float | None, most: float) -> float | None:
    return value if value is not None and 0 <= value <= most else None


def _read_lines(text: str | None) -> tuple[str, ...]:
    """Return the lines within the API's limits; any client may have written the annotation."""
    lines = [line[: keys.RESULT_MAX] for line in str(text or "").splitlines() if line]
    return tuple(lines[: keys.RESULTS_MAX])


def _read_words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(str(text).split()[: keys.DRAINED_MAX])


def _read_trouble(annotation: str) -> tuple[str, str] | None:
    reason, colon, text = annotation.partition(": ")
    return (reason, text) if colon and reason in reasons.VOLUME else None


def _measured_value(found: Mapping[str, str], key: str) -> float | None:
    value = _read_number(found, key)
    return float(f"{value:.{_DIGITS}g}") if value is not None else None


BUDGETS: Mapping[str, tuple[int, str]] = {
    "ending": (60, "pods that save, or whose node does not answer; see the condition Restarting"),
    "scheduling": (30, "no node had room at once; see the condition Scheduled"),
    "containers": (
        300,
        "images that the nodes did not have, or volumes that are slow to mount; pull images ahead of time",
    ),
    "imports": (60, "packages are read from a slow disk or network"),
    "group": (60, "ranks met late; compare the logs of the trainer's pods"),
    "base": (120, "the checkpoint is checked; the volume reads slowly"),
    "model": (120, "the model's files are read; the volume or the hub is slow"),
    "checkpoint": (300, "the checkpoint is read; the volume reads slowly"),
    "publish": (120, "the base version is written; the volume writes slowly"),
    "step": (300, "compilation, or steps of that length"),
}
"""Seconds after which the status reports a phase as slow, and the usual cause. Backoff, queue and rollouts have no limit."""


@dataclass(frozen=True)
class Look:
    """State of a restarting or restarted run in one pass of the operator."""

    was_restarting: bool
    """Whether the condition Restarting was true before this pass."""
    restarting: bool
    """Whether it is true now."""
    ending: bool
    """Whether pods of the ended attempt still exist."""
    attempt: int
    scheduled: bool
    """Whether all pods of the attempt have nodes."""
    running: bool
    """Whether all of their containers run, or have run."""
    trained: bool
    """Whether the attempt has trained a new step."""
    over: bool
    """Whether the run is suspended, complete or failed."""
    start: Mapping[str, float]
    """Seconds of the trainer's start by phase."""


def restart_after(past: RestartStatus | None, look: Look, now: float) -> RestartStatus | None:
    """Return the restart record after this pass. A finished record stays; an unfinished one is dropped if the run is over.

    Args:
        past: previous record.
        look: state of the run.
        now: seconds since the epoch.
    """
    if look.restarting and not look.was_restarting:
        past = RestartStatus(since=format_rfc3339(now))
    if past is None or past.total_seconds is not None:
        return past
    if not look.restarting and look.trained:
        return _finished_record(_reached_phases(past, look, now), look, now)
    return None if look.over else _note_slow_phases(_reached_phases(past, look, now), now)


def _reached_phases(past: RestartStatus, look: Look, now: float) -> RestartStatus:
    """Return the record with the phases that have ended; several at once if no pass ran between their ends."""
    begun = not look.restarting
    ended = (begun or not look.ending, begun, begun and look.scheduled, begun and look.running)
    seconds = {
        name: past.seconds[name] for name in RESTART_PHASES if name in past.seconds
    }  # any client may write a status
    for at, name in enumerate(OBSERVED):
        if not ended[at]:
            break
        if name not in seconds:
            seconds[name] = _seconds_since(past, seconds, now)
    return past.model_copy(update={"seconds": seconds, "attempt": look.attempt if begun else None})


def _seconds_since(past: RestartStatus, seconds: Mapping[str, int], now: float) -> int:
    """Return the seconds since the end of the recorded phases, or 0 if the clock was set back."""
    began = seconds_of(past.since)
    spent = now - (now if began is None else began) - sum(seconds.values())
    return min(max(0, int(spent)), COUNT_MAX)


def _finished_record(past: RestartStatus, look: Look, now: float) -> RestartStatus:
    """Return the record at the first new step; the trainer's own phases are capped at the time that has passed."""
    seconds = dict(past.seconds)
    for name in PHASES:
        if name in look.start:
            seconds[name] = min(round(look.start[name]), _seconds_since(past, seconds, now))
    seconds[OTHER] = _seconds_since(past, seconds, now)
    slow = [
        _describe_slow(name, seconds[name])
        for name in RESTART_PHASES
        if name in seconds and _is_over(name, seconds[name])
    ]
    update = {
        "seconds": seconds,
        "total_seconds": min(sum(seconds.values()), COUNT_MAX),
        "slow": "; ".join(slow) or None,
    }
    return past.model_copy(update=update)


def _note_slow_phases(past: RestartStatus, now: float) -> RestartStatus:
    """Return the record with slow phases so far; the current phase has no number, which would change the status each second."""
    slow = [_describe_slow(name, past.seconds[name]) for name in OBSERVED if _is_over(name, past.seconds.get(name, 0))]
    present = next((name for name in OBSERVED if name not in past.seconds), None)
    if present is not None and _is_over(present, _seconds_since(past, past.seconds, now)):
        most, cause = BUDGETS[present]
        slow.append(f"{present} takes more than {most} s: {cause}")
    return past.model_copy(update={"slow": "; ".join(slow) or None})


def _is_over(name: str, seconds: int) -> bool:
    return name in BUDGETS and seconds > BUDGETS[name][0]


def _describe_slow(name: str, seconds: int) -> str:
    most, cause = BUDGETS[name]
    return f"{name} took {seconds} s of {most} s: {cause}"
