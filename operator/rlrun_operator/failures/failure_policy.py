"""Consequence of a failure: the run's own rules first, then the built-in ones, and the wait before the next attempt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun.api.lifecycle import BackoffSpec, FailurePolicySpec, FailureRule
from rlrun.api.run_status import ProgressStatus, RLRunStatus
from rlrun.backoff import backoff, jittered
from rlrun_operator.failures.detect import Cause, Kind, describe_cause
from rlrun_operator.status import failure_reasons, reasons

JITTER = 0.2
"""Share by which a backoff varies, so that runs that failed together do not restart together."""
FREE_DISRUPTIONS = 3
"""Consecutive immediate restarts after disruptions without a new step; further ones wait like failures."""
_BEGIN_AGAIN = (
    "the run has ended to free its GPUs, and starts again when its specification is edited or it is annotated with "
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
"""Causes that are not failures of the run: the operator's own actions, and those of the volume."""
Action = Literal["FailRun", "Restart", "RestartUncounted"]


@dataclass(frozen=True)
class Budget:
    """Used part of the failure budget."""

    counted: int = 0
    """Restarts that count towards `maxRestarts`."""
    without_step: int = 0
    """Consecutive restarts, of any kind, without a step that had not been trained before."""


@dataclass(frozen=True)
class Verdict:
    """Decision of the failure policy."""

    fails: tuple[str, str] | None
    """Reason and message of Failed; None: the run restarts."""
    counted: bool
    wait_seconds: float = 0.0
    """Seconds before the next attempt starts."""
    rule: str | None = None
    """The run's own rule that decided, with its action, as text for messages."""


def apply_policy(cause: Cause, *, budget: Budget, policy: FailurePolicySpec, random: float) -> Verdict:
    """Return the decision of the failure policy.

    Args:
        cause: cause of the attempt's end.
        budget: used failure budget of the run, before this failure.
        policy: failure policy of the run.
        random: random number in [0, 1), for the jitter.
    """
    rule = first_rule(cause, policy)
    action = rule.action if rule is not None else _built_in(cause)
    rule_text = f"rule {rule.name!r} of failurePolicy.rules ({rule.action})" if rule is not None else None
    if rule is not None and action == "FailRun":
        message = f"{describe_cause(cause)}; {rule_text} ends the run"
        return Verdict((reasons.FAILED_BY_RULE, message), counted=False, rule=rule_text)
    if action == "FailRun" and cause.reason in reasons.NEVER_STARTS:
        return Verdict((cause.reason, f"{cause.message}; {_BEGIN_AGAIN}"), counted=False)
    if action == "FailRun":
        message = (
            f"{describe_cause(cause)}; a restart cannot help: fix the cause, then delete the run and create it again"
        )
        return Verdict((reasons.PERMANENT_FAILURE, message), counted=False)
    if action == "Restart":
        if budget.counted >= policy.max_restarts:
            message = f"{describe_cause(cause)}; failurePolicy.maxRestarts ({policy.max_restarts}) restarts are used up"
            return Verdict((reasons.MAX_RESTARTS_EXCEEDED, message), counted=True, rule=rule_text)
        wait = restart_backoff(budget.counted + 1, policy.backoff, random)
        return Verdict(None, counted=True, wait_seconds=wait, rule=rule_text)
    free = FREE_DISRUPTIONS if rule is None and cause.reason != failure_reasons.STORAGE_ERROR else 1
    in_a_row = budget.without_step + 1 - (free - 1)
    return Verdict(None, counted=False, wait_seconds=restart_backoff(in_a_row, policy.backoff, random), rule=rule_text)


def first_rule(cause: Cause, policy: FailurePolicySpec) -> FailureRule | None:
    """Return the first of the run's rules that matches, or None."""
    if cause.reason in _NOT_FOR_RULES:
        return None
    return next((rule for rule in policy.rules if _rule_fits(rule, cause)), None)


def restart_backoff(restart: int, spec: BackoffSpec, random: float) -> float:
    """Return the seconds before restart number `restart` (from 1): 0, then doubling up to a maximum, with jitter."""
    if restart <= 1:
        return 0.0
    return jittered(backoff(restart - 1, first=spec.initial_seconds, longest=spec.max_seconds), JITTER, random)


def longest_backoff(spec: BackoffSpec) -> float:
    """Return an upper bound of all backoffs, in seconds, rounded up."""
    longest: float = spec.max_seconds * (1 + JITTER) + 1
    return longest


def budget_of(past: RLRunStatus, progress: ProgressStatus, policy: FailurePolicySpec) -> Budget:
    """Return the failure budget used by now; new steps reset it.

    Args:
        past: last written status.
        progress: current progress.
        policy: failure policy of the run.
    """
    counted, new = past.restarts_counted_towards_max, progress.furthest_step - (past.counted_at_step or 0)
    if policy.reset_after_steps is not None and new >= policy.reset_after_steps:
        counted = 0
    # Steps before the last written status have already reset it.
    moved = progress.furthest_step > past.progress.furthest_step
    return Budget(counted, 0 if moved else past.restarts_without_step)


_BUILT_IN: Mapping[Kind, Action] = {
    "failure": "Restart",
    "permanent": "FailRun",
    "disruption": "RestartUncounted",
    "taken": "RestartUncounted",
}


def _built_in(cause: Cause) -> Action:
    """Return the built-in action. A volume that refuses writes is not a fault of the run, and it may take long to recover."""
    if cause.reason == failure_reasons.STORAGE_ERROR and cause.kind == "failure":
        return "RestartUncounted"
    return _BUILT_IN[cause.kind]


def _rule_fits(rule: FailureRule, cause: Cause) -> bool:
    """Return whether a rule matches. A disrupted pod's exit code only shows how it was stopped, so rules on codes alone do not match it."""
    if rule.roles and cause.role not in rule.roles:
        return False
    if rule.on_reasons and cause.reason not in rule.on_reasons:
        return False
    if not rule.on_exit_codes:
        return bool(rule.on_reasons) or cause.kind == "failure"
    return cause.exit_code in rule.on_exit_codes and (cause.kind != "disruption" or bool(rule.on_reasons))
