"""Decision about one run: from everything that is known of it to the next step. A pure function of its arguments.

    Pending ──> Starting ──> Running ──> Completing ──> Complete
                  ^  └───────────┴──> Restarting ─┐
                  └───────────────────────────────┘      any ──> Failed, any ──> Suspending ──> Suspended ──> Starting

Where the operator has a queue, Queued lies before Starting: a run waits there before its first attempt, and after its room was taken back
(Suspending). Every pass begins from
what is observed, never from what an earlier pass meant to do: a crash between any two requests costs one more pass and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from rlrun_operator.decide import completion, lifetime, manual_restart, stall, suspend
from rlrun_operator.decide.attempt import launch
from rlrun_operator.decide.attempt_end import fail, give_up, record
from rlrun_operator.decide.cause import cause_of, settled_at
from rlrun_operator.decide.cost import budget
from rlrun_operator.decide.objects import claims, growth, keys, unstarted
from rlrun_operator.decide.restart import restart
from rlrun_operator.decide.running import follow
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.trainers import look, resizing
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
    decision = replace(
        decision, grow=growth.wanted(case), disown=claims.disowned(case), ask=decision.ask or keys.in_doubt(case)
    )
    decision = replace(decision, look_up=decision.look_up | look.facts(case))
    clocks = [
        decision.wake_in,
        lifetime.seconds_left(case),
        lifetime.seconds_to_live(case),
        budget.look_in(case),
        look.wake_in(case),
    ]
    return replace(decision, wake_in=min((s for s in clocks if s is not None and s >= 0), default=None))


@dataclass(frozen=True)
class Situation:
    """A run and the facts about it that more than one rule asks for."""

    case: Case

    @cached_property
    def mended(self) -> bool:
        """True if the run had failed and the cause of that is put right."""
        return _mended(self.case)

    @cached_property
    def restarting(self) -> bool:
        """An attempt has ended, and the next one has not begun."""
        return is_true(self.case.past.conditions, reasons.RESTARTING)

    @cached_property
    def launched(self) -> bool:
        """All workloads of the newest attempt were seen."""
        past = self.case.past
        return past.attempt > 0 and past.launched_attempt >= past.attempt == self.case.attempt

    @cached_property
    def done(self) -> bool:
        """The attempt has done all that it was made for, and no other one is to begin at once."""
        return completion.is_complete(self.case) and not (
            self.restarting and (self.case.joined_guests or lifetime.has_more_steps(self.case))
        )

    @cached_property
    def suspension(self) -> Decision | None:
        """Next thing to do on the way into suspension, in it, or out of it."""
        return suspend.suspension(self.case)


Rule = Callable[[Situation], Decision | None]
"""One rule: its decision; None where it does not apply."""


def _stay_over(it: Situation) -> Decision | None:
    """Complete and Failed absorb, but for what is asked to begin again."""
    past = it.case.past.conditions
    if it.mended or not (is_true(past, reasons.COMPLETE) or is_true(past, reasons.FAILED)):
        return None
    # One that shall be suspended too: what it begins again for is on record first.
    return manual_restart.revived(it.case) or completion.ended(it.case)


def _train_more_steps(it: Situation) -> Decision | None:
    if not it.done or not lifetime.has_more_steps(it.case):
        return None
    return it.suspension or manual_restart.more_steps(it.case)


def _complete(it: Situation) -> Decision | None:
    """A run that would stay for its guests alone can be suspended."""
    if not it.done or (it.case.joined_guests and it.suspension is not None):
        return None
    return completion.complete(it.case)


def _suspend(it: Situation) -> Decision | None:
    return it.suspension


def _end_late(it: Situation) -> Decision | None:
    left = lifetime.seconds_left(it.case)
    if left is None or left > 0:
        return None
    return fail(it.case, reasons.DEADLINE_EXCEEDED, lifetime.deadline_message(it.case))


def _end_invalid(it: Situation) -> Decision | None:
    """An attempt that runs goes on with the specification that it began with."""
    if it.case.spec is not None or it.launched:
        return None
    return fail(it.case, reasons.INVALID_CONFIGURATION, it.case.problems)


def _restart_as_asked(it: Situation) -> Decision | None:
    return manual_restart.asked(it.case, is_restarting=it.restarting)


def _restart(it: Situation) -> Decision | None:
    between = (it.restarting or it.mended) and it.case.attempt == it.case.past.attempt > 0
    return restart(it.case) if between else None


def _launch(it: Situation) -> Decision | None:
    """Begin the first attempt, or make one whole whose children are not all there."""
    case = it.case
    return launch(case, case.spec, max(case.attempt, 1)) if case.spec is not None and not it.launched else None


def _end_unstartable(it: Situation) -> Decision | None:
    """End a run one of whose roles never starts, also where its last pod cannot be made."""
    whole = it.case.attempt == it.case.past.attempt
    return _end_hanging(it) if whole and not it.restarting and unstarted.stuck(it.case) is not None else None


def _renew_unstarted(it: Situation) -> Decision | None:
    return manual_restart.renewed(it.case)


def _end_attempt(it: Situation) -> Decision | None:
    cause = cause_of(it.case, settled_at(it.case))
    return None if cause is None else record(it.case, cause)


def _end_hanging(it: Situation) -> Decision | None:
    if (hangs := stall.cause(it.case)) is None:
        return None
    return give_up(it.case, hangs) if stall.ends_run(it.case) else record(it.case, hangs)


def _resize_trainer(it: Situation) -> Decision | None:
    return resizing.resized(it.case)


RULES: tuple[Rule, ...] = (
    _stay_over,
    _train_more_steps,
    _complete,
    _suspend,
    _end_late,
    _end_invalid,
    _restart_as_asked,
    _restart,
    _end_unstartable,
    _launch,
    _renew_unstarted,
    _end_attempt,
    _end_hanging,
    _resize_trainer,
)
"""Rules in the order of their precedence."""


def _decide(case: Case) -> Decision:
    """The first rule that applies; where none does, the attempt goes on."""
    situation = Situation(case)
    for rule in RULES:
        if (decision := rule(situation)) is not None:
            return decision
    return follow(case, case.past.attempt)


def _mended(case: Case) -> bool:
    """True if the run failed by its specification alone and has another one now, or by a policy that allows it now."""
    failed = find(case.past.conditions, reasons.FAILED)
    if failed is None or failed.status != "True":
        return False
    if failed.reason in reasons.NEVER_STARTS:
        return bool(case.past.unstarted) and case.spec is not None and case.spec_hash != case.past.spec_hash
    edited = case.generation != case.past.observed_generation
    if failed.reason == reasons.FORBIDDEN:
        return edited or (case.spec is not None and not case.forbidden)
    if failed.reason == reasons.INVALID_CONFIGURATION and case.applied.taken and case.spec is not None:
        return True  # the defaults of its namespace were in the way
    return failed.reason in (reasons.INVALID_CONFIGURATION, reasons.FAILED_TO_START) and edited
