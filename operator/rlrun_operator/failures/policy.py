"""Cost of a failure: the run's own rules first, then the built-in ones, and the wait before the next attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlrun.api.lifecycle import BackoffSpec, FailurePolicySpec, FailureRule
from rlrun.api.status import ProgressStatus, RLRunStatus
from rlrun.backoff import backoff, jittered
from rlrun_operator.failures.detect import Cause, told_of
from rlrun_operator.status import failure_reasons, reasons

JITTER = 0.2
"""Share by which a backoff is longer or shorter, so that runs that failed together do not start together."""
FREE_DISRUPTIONS = 3
"""Restarts in a row without a new step that a disruption gets at once; a storm of them then waits like failures do."""
_BEGIN_AGAIN = (
    "the run has ended to free its GPUs, and begins again when its specification is edited or it is annotated with "
    "rlrun.io/restart-requested-at"
)
_NOT_FOR_RULES = frozenset(
    {
        failure_reasons.NUMBER_TAKEN,
        failure_reasons.SPEC_CHANGED,
        failure_reasons.HOST_RESTARTED,
        reasons.HOST_SUSPENDED,
        failure_reasons.HOST_GONE,
        failure_reasons.NODE_ALLOWED,
        failure_reasons.NODE_NEEDED,
        reasons.CLAIM_DELETED,
    }
)
"""The operator's own doing, and the volume's: no failure of the run."""
Action = Literal["FailRun", "Restart", "RestartUncounted"]


@dataclass(frozen=True)
class Budget:
    """Budget that the past has used up."""

    counted: int = 0
    """Restarts that count towards `maxRestarts`."""
    without_step: int = 0
    """Restarts in a row, of any kind, without a step that had not been trained before."""


@dataclass(frozen=True)
class Verdict:
    """Answer of the failure policy."""

    fails: tuple[str, str] | None
    """Reason and message of Failed; None: the run restarts."""
    counted: bool
    wait_seconds: float = 0.0
    """Before the next attempt begins."""
    rule: str | None = None
    """The run's own rule that decided, with its action, for people."""


def apply_policy(cause: Cause, *, budget: Budget, policy: FailurePolicySpec, random: float) -> Verdict:
    """Apply the failure policy.

    Args:
        cause: why the attempt ended.
        budget: of the run, before this failure.
        policy: of the run.
        random: in [0, 1), for the jitter.
    """
    rule = first_rule(cause, policy)
    action = rule.action if rule is not None else _built_in(cause)
    told = f"rule {rule.name!r} of failurePolicy.rules ({rule.action})" if rule is not None else None
    if rule is not None and action == "FailRun":
        message = f"{told_of(cause)}; {told} ends the run"
        return Verdict((reasons.FAILED_BY_RULE, message), counted=False, rule=told)
    if action == "FailRun" and cause.reason in reasons.NEVER_STARTS:
        return Verdict((cause.reason, f"{cause.message}; {_BEGIN_AGAIN}"), counted=False)
    if action == "FailRun":
        message = f"{told_of(cause)}; starting again cannot help: mend it, then delete the run and create it again"
        return Verdict((reasons.PERMANENT_FAILURE, message), counted=False)
    if action == "Restart":
        if budget.counted >= policy.max_restarts:
            message = f"{told_of(cause)}; failurePolicy.maxRestarts ({policy.max_restarts}) restarts are used up"
            return Verdict((reasons.MAX_RESTARTS_EXCEEDED, message), counted=True, rule=told)
        return Verdict(
            None, counted=True, wait_seconds=restart_backoff(budget.counted + 1, policy.backoff, random), rule=told
        )
    free = FREE_DISRUPTIONS if rule is None and cause.reason != failure_reasons.STORAGE_ERROR else 1
    in_a_row = budget.without_step + 1 - (free - 1)
    return Verdict(None, counted=False, wait_seconds=restart_backoff(in_a_row, policy.backoff, random), rule=told)


def first_rule(cause: Cause, policy: FailurePolicySpec) -> FailureRule | None:
    """The first of the run's rules that fits."""
    if cause.reason in _NOT_FOR_RULES:
        return None
    return next((rule for rule in policy.rules if _rule_fits(rule, cause)), None)


def restart_backoff(restart: int, spec: BackoffSpec, random: float) -> float:
    """Seconds before restart number `restart` (from 1): none, then doubling up to a maximum, with jitter."""
    if restart <= 1:
        return 0.0
    return jittered(backoff(restart - 1, first=spec.initial_seconds, longest=spec.max_seconds), JITTER, random)


def longest_backoff(spec: BackoffSpec) -> float:
    """No backoff lasts more seconds than this, rounded up as it is."""
    longest: float = spec.max_seconds * (1 + JITTER) + 1
    return longest


def budget_of(past: RLRunStatus, progress: ProgressStatus, policy: FailurePolicySpec) -> Budget:
    """Budget used up by now: steps that were never trained before make the run's past forgotten.

    Args:
        past: the status as it was written last.
        progress: as it is now.
        policy: of the run.
    """
    counted, new = past.restarts_counted_towards_max, progress.furthest_step - (past.counted_at_step or 0)
    if policy.reset_after_steps is not None and new >= policy.reset_after_steps:
        counted = 0
    # Steps before the last written status have made it zero already.
    moved = progress.furthest_step > past.progress.furthest_step
    return Budget(counted, 0 if moved else past.restarts_without_step)


def _built_in(cause: Cause) -> Action:
    """A volume that refuses to write is no fault of the run's, and it may take long until it takes data again."""
    if cause.reason == failure_reasons.STORAGE_ERROR and cause.kind == "failure":
        return "RestartUncounted"
    return {"permanent": "FailRun", "disruption": "RestartUncounted", "taken": "RestartUncounted"}.get(  # type: ignore[return-value]
        cause.kind, "Restart"
    )


def _rule_fits(rule: FailureRule, cause: Cause) -> bool:
    """A disrupted pod's exit code is of how it was stopped and not of why: a rule on codes alone does not mean it."""
    if rule.roles and cause.role not in rule.roles:
        return False
    if rule.on_reasons and cause.reason not in rule.on_reasons:
        return False
    if not rule.on_exit_codes:
        return bool(rule.on_reasons) or cause.kind == "failure"
    return cause.exit_code in rule.on_exit_codes and (cause.kind != "disruption" or bool(rule.on_reasons))
