"""State machine of one run: from the observed state to the next actions. A pure function of its arguments.

    Pending ──> Starting ──> Running ──> Completing ──> Complete
                  ^  └───────────┴──> Restarting ─┐
                  └───────────────────────────────┘      any ──> Failed, any ──> Suspending ──> Suspended ──> Starting

With a queue, Queued precedes Starting: a run waits there before its first attempt, and after the queue took its room back (Suspending).
Every pass starts from the observed state, never from the intentions of an earlier pass. So a crash between two requests costs one more
pass and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from rlrun_operator.decide import (
    api_keys,
    claims,
    completion,
    elastic_trainer,
    gpu_time,
    lifetime,
    restart,
    stall,
    suspend,
    workload_edits,
)
from rlrun_operator.decide.attempt import launch_attempt
from rlrun_operator.decide.attempt_end import fail_run, give_up, record_end
from rlrun_operator.decide.completion import cause_of, settled_at
from rlrun_operator.decide.restart import continue_restart
from rlrun_operator.decide.running import follow_attempt
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import CheckSecret, Decision, Observed, in_order
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition, is_true


def decide(observed: Observed, now: float, *, settings: RenderSettings, fresh_key: str, random: float) -> Decision:
    """Decide the next actions and the new status of a run.

    Args:
        observed: state of the run and its objects in the cluster.
        now: seconds since the epoch.
        settings: settings of the installation, for rendering children.
        fresh_key: new API key, which is used only if a Secret is created.
        random: number in [0, 1) for the jitter of backoffs.
    """
    run = RunSnapshot(observed, now, settings, fresh_key, random)
    if "deletionTimestamp" in run.metadata:  # owner references do the rest
        return Decision(status=observed.run.get("status") or {}, urgency="progress")
    # One rule decides about the attempt. An annotation with an invalid value is reported next to any
    # decision.
    decision = restart.warn_invalid_annotation(run, _apply_first_rule(run))
    # The claim and the key are independent of the rule, so their writes are added to every decision. A
    # decision that starts an attempt checks the Secret already.
    checks = any(isinstance(write, CheckSecret) for write in decision.writes)
    more = (claims.wanted_growth(run), claims.disown_claim(run), None if checks else api_keys.in_doubt(run))
    writes = in_order((*decision.writes, *(write for write in more if write is not None)))
    decision = replace(decision, writes=writes, look_up=decision.look_up | elastic_trainer.request_facts(run))
    # A pass at each deadline: no event reports that time has passed.
    clocks = [
        decision.wake_in,
        lifetime.seconds_left(run),
        lifetime.seconds_to_live(run),
        gpu_time.look_in(run),
        elastic_trainer.wake_in(run),
    ]
    return replace(decision, wake_in=min((s for s in clocks if s is not None and s >= 0), default=None))


@dataclass(frozen=True)
class Situation:
    """A run, and facts that several rules read."""

    run: RunSnapshot

    @cached_property
    def is_corrected(self) -> bool:
        """Whether the run had failed and the cause of the failure is corrected."""
        return _is_corrected(self.run)

    @cached_property
    def is_restarting(self) -> bool:
        """Whether an attempt has ended and the next one has not started."""
        return is_true(self.run.past.conditions, reasons.RESTARTING)

    @cached_property
    def is_launched(self) -> bool:
        """Whether all workloads of the newest attempt were observed."""
        past = self.run.past
        return past.attempt > 0 and past.launched_attempt >= past.attempt == self.run.attempt

    @cached_property
    def is_finished(self) -> bool:
        """Whether the attempt has finished its work and no other attempt starts at once."""
        return completion.is_complete(self.run) and not (
            self.is_restarting and (self.run.joined_guests or lifetime.has_more_steps(self.run))
        )

    @cached_property
    def suspension_step(self) -> Decision | None:
        """Next step into suspension, during it, or out of it; None if the run is not affected."""
        return suspend.continue_suspension(self.run)


Rule = Callable[[Situation], Decision | None]
"""Returns the decision of one rule, or None if the rule does not apply."""


def _stay_over(it: Situation) -> Decision | None:
    """Complete and Failed are terminal until a restart is requested."""
    past = it.run.past.conditions
    if it.is_corrected or not (is_true(past, reasons.COMPLETE) or is_true(past, reasons.FAILED)):
        return None
    # This rule precedes suspension, so that the reason of a restart is recorded first.
    return restart.revive_ended_run(it.run) or completion.clean_ended_run(it.run)


def _train_more_steps(it: Situation) -> Decision | None:
    if not it.is_finished or not lifetime.has_more_steps(it.run):
        return None
    return it.suspension_step or restart.more_steps(it.run)


def _complete_or_suspend(it: Situation) -> Decision | None:
    """Complete the run. A finished run that stays only for its guests can be suspended instead."""
    if not it.is_finished or (it.run.joined_guests and it.suspension_step is not None):
        return None
    return completion.complete_run(it.run)


def _suspend_run(it: Situation) -> Decision | None:
    return it.suspension_step


def _end_late(it: Situation) -> Decision | None:
    left = lifetime.seconds_left(it.run)
    if left is None or left > 0:
        return None
    return fail_run(it.run, reasons.DEADLINE_EXCEEDED, lifetime.deadline_message(it.run))


def _end_invalid(it: Situation) -> Decision | None:
    """Fail a run with an invalid specification. A running attempt continues with the specification that it started with."""
    if it.run.spec is not None or it.is_launched:
        return None
    return fail_run(it.run, reasons.INVALID_CONFIGURATION, it.run.problems)


def _restart_as_asked(it: Situation) -> Decision | None:
    return restart.restart_by_request(it.run, is_restarting=it.is_restarting)


def _restart_run(it: Situation) -> Decision | None:
    between = (it.is_restarting or it.is_corrected) and it.run.attempt == it.run.past.attempt > 0
    return continue_restart(it.run) if between else None


def _launch_run(it: Situation) -> Decision | None:
    """Start the first attempt, or complete an attempt whose children do not all exist."""
    run = it.run
    return launch_attempt(run, run.spec, max(run.attempt, 1)) if run.spec is not None and not it.is_launched else None


def _end_unstartable(it: Situation) -> Decision | None:
    """End a run if one of its roles never starts, even if the last pod cannot be created."""
    whole = it.run.attempt == it.run.past.attempt
    return (
        _end_hanging(it)
        if whole and not it.is_restarting and workload_edits.find_stuck_role(it.run) is not None
        else None
    )


def _renew_unstarted(it: Situation) -> Decision | None:
    return restart.restart_after_edit(it.run)


def _end_attempt(it: Situation) -> Decision | None:
    cause = cause_of(it.run, settled_at(it.run))
    return None if cause is None else record_end(it.run, cause)


def _end_hanging(it: Situation) -> Decision | None:
    if (hangs := stall.stall_cause(it.run)) is None:
        return None
    return give_up(it.run, hangs) if stall.ends_run(it.run) else record_end(it.run, hangs)


def _resize_trainer(it: Situation) -> Decision | None:
    return restart.resize_trainer(it.run)


RULES: tuple[Rule, ...] = (
    # Terminal states come first: no later rule may change the record of an ended run.
    _stay_over,
    # A finished run is judged before everything that stops or fails a run: a deadline or an invalid edit must
    # not turn its work into a failure.
    _train_more_steps,
    _complete_or_suspend,
    # Suspension precedes failures: pods that end because of it have not failed.
    _suspend_run,
    # Reasons to end precede all rules that could start another attempt.
    _end_late,
    _end_invalid,
    # A request for a restart ends the backoff, so it is read before the restart that waits for it.
    _restart_as_asked,
    _restart_run,
    # Before `_launch_run`, which creates the missing objects again as long as the attempt is incomplete.
    _end_unstartable,
    _launch_run,
    # From here on all workloads exist. An edit comes before failures, because it may correct the cause of the
    # failure.
    _renew_unstarted,
    _end_attempt,
    # A failed pod explains missing progress, so hangs are judged after failures.
    _end_hanging,
    # Only a healthy attempt is ended for another size.
    _resize_trainer,
)
"""Rules in order of precedence: the first one that applies decides."""


def _apply_first_rule(run: RunSnapshot) -> Decision:
    """Return the decision of the first rule that applies; if none applies, the attempt continues."""
    situation = Situation(run)
    for rule in RULES:
        if (decision := rule(situation)) is not None:
            return decision
    return follow_attempt(run, run.past.attempt)


def _is_corrected(run: RunSnapshot) -> bool:
    """Return whether a failed specification was edited, or whether the policy that refused it now allows it."""
    failed = find_condition(run.past.conditions, reasons.FAILED)
    if failed is None or failed.status != "True":
        return False
    if failed.reason in reasons.NEVER_STARTS:
        return bool(run.past.unstarted) and run.spec is not None and run.spec_hash != run.past.spec_hash
    edited = run.generation != run.past.observed_generation
    if failed.reason == reasons.FORBIDDEN:
        return edited or (run.spec is not None and not run.forbidden_fields)
    if failed.reason == reasons.INVALID_CONFIGURATION and run.applied.taken and run.spec is not None:
        return True  # the defaults of its namespace had made it invalid
    return failed.reason in (reasons.INVALID_CONFIGURATION, reasons.FAILED_TO_START) and edited
