"""Budget of GPU time (`spec.budget`): a warning when most of it is spent, and a suspension when all of it is spent. Pure.

Spent time never decreases. A run with a spent budget stays suspended until the budget is raised or removed, and then resumes by itself. The
operator does not edit the specification.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.decide.cost import ledger
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, is_true

NEARLY = 0.8
"""Spent share of the budget that causes the warning."""
LEAST_WAIT_SECONDS = 1.0


def gpu_hours(run: RunSnapshot) -> float | None:
    """Return the budget as written, because the rest of the specification may be invalid. None without a budget, and for guests."""
    budget = (run.observed.run.get("spec") or {}).get("budget")
    found = budget.get("gpuHours") if isinstance(budget, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0 or run.host_name is not None:
        return None
    return float(found)


def is_spent(run: RunSnapshot) -> bool:
    """Return whether the budget is spent."""
    limit = gpu_hours(run)
    return limit is not None and ledger.spent_gpu_seconds(run)[0] >= limit * 3600


def spent_message(run: RunSnapshot) -> str:
    """Return the message about a spent budget, with the fix."""
    limit = gpu_hours(run) or 0.0
    fix = "raise budget.gpuHours, or remove budget, and the run resumes by itself from its checkpoint"
    return f"budget.gpuHours ({limit:g}) is spent; {fix}"


def with_budget_condition(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the condition WithinBudget."""
    kind, limit = reasons.WITHIN_BUDGET, gpu_hours(run)
    past = run.past.conditions
    if limit is None:
        return updates if find_condition(past, kind) is None else {**updates, kind: None}
    if is_true(past, reasons.COMPLETE) or is_true(past, reasons.FAILED):
        return updates
    share = ledger.spent_gpu_seconds(run)[0] / (limit * 3600)
    if share >= 1:
        update = ConditionUpdate("False", reasons.BUDGET_SPENT, spent_message(run))
    elif share >= NEARLY:
        what = f"{NEARLY:.0%} of budget.gpuHours ({limit:g}) is spent; the run saves and is suspended when all is"
        update = ConditionUpdate(
            "True", reasons.BUDGET_NEARLY_SPENT, f"{what}; raise budget.gpuHours at any time, and it is not"
        )
    else:
        update = ConditionUpdate(
            "True", reasons.BUDGET_LEFT, f"less than {NEARLY:.0%} of budget.gpuHours ({limit:g}) is spent"
        )
    return {**updates, kind: update}


def look_in(run: RunSnapshot) -> float | None:
    """Return the seconds until the next threshold of the budget with the currently held GPUs; None if no threshold is ahead."""
    limit = gpu_hours(run)
    if limit is None:
        return None
    now, holds = ledger.spent_gpu_seconds(run)
    ahead = [limit * 3600 * share - now for share in (NEARLY, 1.0) if now < limit * 3600 * share]
    return max(min(ahead) / holds, LEAST_WAIT_SECONDS) if ahead and holds else None
