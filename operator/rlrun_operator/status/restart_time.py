"""Time of a restart: seconds by phase, from the end of an attempt that was seen to the first new step of the next one.

Each phase ends when this operator first sees what ends it, by its own clock; those inside of the trainer are its own measurements. What
is left between the two is `other`, so that the phases add up to the whole. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlrun.api.status import COUNT_MAX, RestartStatus
from rlrun.protocol.messages.start_times import OBSERVED, OTHER, PHASES, RESTART_PHASES
from rlrun_operator.times import rfc3339, seconds_of

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
"""Seconds that a phase may take before the status says so, and the usual cause. The backoff, the queue and the rollouts have none."""


@dataclass(frozen=True)
class Look:
    """One look at a run that restarts, or has restarted."""

    was_restarting: bool
    """The condition Restarting was true."""
    restarting: bool
    """It is true now."""
    ending: bool
    """Pods of the ended attempt are left."""
    attempt: int
    scheduled: bool
    """All pods of the attempt have nodes."""
    running: bool
    """All of their containers run, or have run."""
    trained: bool
    """The attempt has trained a new step."""
    over: bool
    """The run is suspended, complete or failed."""
    start: Mapping[str, float]
    """Seconds of the trainer's start by phase."""


def restart_after(past: RestartStatus | None, look: Look, now: float) -> RestartStatus | None:
    """The record after a look. One of a restart whose attempt came to nothing makes room for the next; one that is whole stays.

    Args:
        past: the record before.
        look: what is seen.
        now: seconds since the epoch.
    """
    if look.restarting and not look.was_restarting:
        past = RestartStatus(since=rfc3339(now))
    if past is None or past.total_seconds is not None:
        return past
    if not look.restarting and look.trained:
        return _finished_record(_reached_phases(past, look, now), look, now)
    return None if look.over else _note_slow_phases(_reached_phases(past, look, now), now)


def _reached_phases(past: RestartStatus, look: Look, now: float) -> RestartStatus:
    """The record with the phases that have ended; several at once where nothing was seen between them."""
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
    """Seconds since the end of the phases before; 0 where the clock was set back."""
    began = seconds_of(past.since)
    spent = now - (now if began is None else began) - sum(seconds.values())
    return min(max(0, int(spent)), COUNT_MAX)


def _finished_record(past: RestartStatus, look: Look, now: float) -> RestartStatus:
    """The record at the first new step; the trainer's own phases are cut to the time that has passed."""
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
    """The record with the phases so far that took too long; of the present one without a number, which would change all the time."""
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
