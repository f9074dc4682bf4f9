"""Report of refused writes to existing objects: scaling, deletion, annotations, the check for a Secret. Pure.

Conditions that wait for an object report that it cannot be created. All other refusals are reported by ChildrenIntact, and by Restarting,
Suspended or Complete while this condition waits for the refused write, for example for the removal of pods.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.defaults.words import shorten_text
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.state import MADE, Refusal
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition
from rlrun_operator.status.scene import TEXT_MAX

SHOWN = 4
"""Most refusals that a message names."""
ALSO = ". Also: "
LET_IN = "everything that the operator writes of this run is let in again"
_WAITS = (
    (reasons.RESTARTING, reasons.PODS_ENDING),
    (reasons.SUSPENDED, reasons.SUSPENDING),
    (reasons.COMPLETE, reasons.COMPLETING),
)
"""Conditions that wait for removals, with their reasons."""


def with_refused_writes(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the refused writes; after the last refusal, ChildrenIntact reports the end."""
    undone = _unreported_refusals(run, updates)
    if not undone:
        return _let_in(run, updates)
    kind, words = reasons.CHILDREN_INTACT, _describe_refusals(undone)
    return {**updates, kind: _append_refusals(updates.get(kind), words), **_waiting_conditions(updates, words)}


def _unreported_refusals(run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]) -> list[Refusal]:
    """Return the refused writes that no other condition reports; spot engines, for example, have no such condition."""
    messages = [one.message for one in updates.values() if one is not None]

    def waited_for(each: Refusal) -> bool:
        return each.doing == MADE and any(shorten_text(each.text, TEXT_MAX) in message for message in messages)

    return [each for each in run.observed.refused if not waited_for(each)]


def _let_in(run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]) -> Mapping[str, ConditionUpdate | None]:
    kind = reasons.CHILDREN_INTACT
    past = find_condition(run.past.conditions, kind)
    stood = past is not None and (past.status, past.reason) == ("False", reasons.ADMISSION_REFUSED)
    return (
        {**updates, kind: ConditionUpdate("True", reasons.REPAIRED, LET_IN)}
        if stood and updates.get(kind) is None
        else updates
    )


def _append_refusals(now: ConditionUpdate | None, words: str) -> ConditionUpdate:
    """Return ChildrenIntact with the refused writes added to its message."""
    if now is None or now.status != "False" or now.reason == reasons.RUN_OVER:
        return ConditionUpdate("False", reasons.ADMISSION_REFUSED, words)
    return now._replace(message=f"{now.message}{ALSO}{words}")


def _waiting_conditions(updates: Mapping[str, ConditionUpdate | None], words: str) -> dict[str, ConditionUpdate | None]:
    """Return the conditions that wait for removals, with the reason of the refusal."""
    waits = {life: one for life, waits in _WAITS if (one := updates.get(life)) is not None and one.reason == waits}
    return {life: one._replace(message=f"{one.message}; {words}") for life, one in waits.items()}


def _describe_refusals(undone: list[Refusal]) -> str:
    found = [_describe_refusal(each) for each in undone[:SHOWN]]
    return ALSO.join(found) + (f" and {len(undone) - SHOWN} more" if len(undone) > SHOWN else "")


def _describe_refusal(refusal: Refusal) -> str:
    what = f"{refusal.ref.kind} {refusal.ref.name} cannot {refusal.doing}"
    return admission_limits.kept_out(what, shorten_text(refusal.text, TEXT_MAX), "the run").message
