"""Budget of GPU time (`spec.budget`): a warning when most of it is spent, and a run that suspends itself when all is. Pure.

What is spent never falls, so that a run whose budget is spent stays suspended until the budget is raised or removed, and then goes on by
itself. Nobody edits the specification but its author.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.decide.cost import ledger
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, is_true

NEARLY = 0.8
"""Share of the budget from which a person is warned."""
LEAST_WAIT_SECONDS = 1.0


def gpu_hours(run: RunSnapshot) -> float | None:
    """The budget, as it stands there: the rest of the specification may be invalid. None: there is none; a guest's is its host's."""
    budget = (run.observed.run.get("spec") or {}).get("budget")
    found = budget.get("gpuHours") if isinstance(budget, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0 or run.host_name is not None:
        return None
    return float(found)


def is_spent(run: RunSnapshot) -> bool:
    """True if the run may use no more GPU time."""
    limit = gpu_hours(run)
    return limit is not None and ledger.spent_gpu_seconds(run)[0] >= limit * 3600


def spent_message(run: RunSnapshot) -> str:
    """Message about a budget that is spent, and what to do."""
    limit = gpu_hours(run) or 0.0
    fix = "raise budget.gpuHours, or remove budget, and the run goes on by itself from its checkpoint"
    return f"budget.gpuHours ({limit:g}) is spent; {fix}"


def with_budget_condition(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Conditions to write, WithinBudget among them."""
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
    """Seconds until the next threshold of the budget is reached with the GPUs that the run holds; None: none will be."""
    limit = gpu_hours(run)
    if limit is None:
        return None
    now, holds = ledger.spent_gpu_seconds(run)
    ahead = [limit * 3600 * share - now for share in (NEARLY, 1.0) if now < limit * 3600 * share]
    return max(min(ahead) / holds, LEAST_WAIT_SECONDS) if ahead and holds else None
