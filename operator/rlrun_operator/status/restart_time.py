"""Duration of a restart: seconds by phase, from the observed end of an attempt to the first new step of the next one.

Each phase ends when this operator first observes its end, by its own clock; phases inside the trainer are the trainer's own
measurements. The phase `other` is the remainder, so that the phases add up to the total. Pure.
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
        past = RestartStatus(since=rfc3339(now))
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
