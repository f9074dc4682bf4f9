"""The brain: from everything that is known of one run to what is to be done next. A pure function of its arguments.

    Pending ──> Starting ──> Running ──> Completing ──> Complete
                  ^  └───────────┴──> Restarting ─┐
                  └───────────────────────────────┘      any ──> Failed, any ──> Suspending ──> Suspended ──> Starting

Queued lies between Pending and Starting, once it exists. Every pass begins from
what is observed, never from what an earlier pass meant to do: a crash between any two requests costs one more pass and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator.decide import (
    completion,
    growth,
    keys,
    lifetime,
    manual_restart,
    stall,
    suspend,
)
from rlrun_operator.decide.attempt import launch
from rlrun_operator.decide.attempt_end import fail, give_up, record
from rlrun_operator.decide.cause import cause_of, settled_at
from rlrun_operator.decide.restart import restart
from rlrun_operator.decide.running import follow
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Decision, Observed
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find, is_true


def decide(observed: Observed, now: float, *, settings: RenderSettings, fresh_key: str, random: float) -> Decision:
    """Decision about a run.

    Args:
        observed: everything that is known about it.
        now: seconds since the epoch.
        settings: for rendering children.
        fresh_key: a new API key; used only where a Secret is created.
        random: in [0, 1), for the jitter of backoffs.
    """
    case = Case(observed, now, settings, fresh_key, random)
    if "deletionTimestamp" in case.metadata:  # owner references do the rest
        return Decision(status=observed.run.get("status") or {}, urgency="progress")
    decision = manual_restart.told_of_nonsense(case, _decide(case))
    decision = replace(decision, grow=growth.wanted(case), ask=decision.ask or keys.in_doubt(case))
    clocks = [decision.wake_in, lifetime.seconds_left(case), lifetime.seconds_to_live(case)]
    return replace(decision, wake_in=min((s for s in clocks if s is not None and s >= 0), default=None))


def _decide(case: Case) -> Decision:
    past = case.past
    mended = _mended(case)
    if (is_true(past.conditions, reasons.COMPLETE) or is_true(past.conditions, reasons.FAILED)) and not mended:
        return manual_restart.revived(case) or completion.ended(
            case
        )  # one that shall be suspended too: what it begins again for is on record first
    launched = past.attempt > 0 and past.launched_attempt >= past.attempt == case.attempt
    restarting = is_true(past.conditions, reasons.RESTARTING)
    more = lifetime.has_more_steps(case)
    suspended = suspend.suspension(case)
    if completion.is_complete(case) and not (restarting and (case.joined_guests or more)):
        if more:
            return suspended or manual_restart.more_steps(case)
        if suspended is None or not case.joined_guests:
            return completion.complete(case)
    if suspended is not None:
        return suspended
    left = lifetime.seconds_left(case)
    if left is not None and left <= 0:
        return fail(case, reasons.DEADLINE_EXCEEDED, lifetime.deadline_message(case))
    if case.spec is None and not launched:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    if (asked := manual_restart.asked(case, is_restarting=restarting)) is not None:
        return asked
    if (restarting or mended) and case.attempt == past.attempt > 0:
        return restart(case)
    if case.spec is not None and not launched:
        return launch(case, case.spec, max(case.attempt, 1))
    cause = cause_of(case, settled_at(case))
    if cause is None and (hangs := stall.cause(case)) is not None:
        return give_up(case, hangs) if stall.ends_run(case) else record(case, hangs)
    return record(case, cause) if cause is not None else follow(case, past.attempt)


def _mended(case: Case) -> bool:
    """Whether the run failed by its specification alone and has another one now, or by a policy that allows it now."""
    failed = find(case.past.conditions, reasons.FAILED)
    if failed is None or failed.status != "True":
        return False
    edited = case.generation != case.past.observed_generation
    if failed.reason == reasons.FORBIDDEN:
        return edited or (case.spec is not None and not case.forbidden)
    return failed.reason == reasons.INVALID_CONFIGURATION and edited
