"""Writes to what exists that are not let in: a scale, a deletion, annotations, the question for a Secret. Pure.

Objects that cannot be made are reported by the conditions that wait for them; these here are reported by ChildrenIntact, and by the
condition that says where the run is in its life, while it is that which waits: pods of an ended attempt that cannot be removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.defaults.words import shorten
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.state import MADE, Refusal
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import Say, find
from rlrun_operator.status.scene import TEXT_MAX

SHOWN = 4
"""Refusals that a message names."""
ALSO = ". Also: "
LET_IN = "everything that the operator writes of this run is let in again"
_WAITS = (
    (reasons.RESTARTING, reasons.PODS_ENDING),
    (reasons.SUSPENDED, reasons.SUSPENDING),
    (reasons.COMPLETE, reasons.COMPLETING),
)
"""Conditions that wait for removals, with their reasons."""


def noted(case: Case, said: Mapping[str, Say | None]) -> Mapping[str, Say | None]:
    """`said` with the refused writes; once none is, ChildrenIntact says so."""
    undone = _undone(case, said)
    if not undone:
        return _let_in(case, said)
    kind, words = reasons.CHILDREN_INTACT, _told(undone)
    return {**said, kind: _beside(said.get(kind), words), **_of_waits(said, words)}


def _undone(case: Case, said: Mapping[str, Say | None]) -> list[Refusal]:
    """Refused writes that no condition reports: an object is waited for by one, or, as spot engines are, by none."""
    told = [one.message for one in said.values() if one is not None]

    def waited_for(each: Refusal) -> bool:
        return each.doing == MADE and any(shorten(each.text, TEXT_MAX) in message for message in told)

    return [each for each in case.observed.refused if not waited_for(each)]


def _let_in(case: Case, said: Mapping[str, Say | None]) -> Mapping[str, Say | None]:
    kind = reasons.CHILDREN_INTACT
    past = find(case.past.conditions, kind)
    stood = past is not None and (past.status, past.reason) == ("False", reasons.ADMISSION_REFUSED)
    return {**said, kind: Say("True", reasons.REPAIRED, LET_IN)} if stood and said.get(kind) is None else said


def _beside(now: Say | None, words: str) -> Say:
    """ChildrenIntact with the refused writes beside what it says already."""
    if now is None or now.status != "False" or now.reason == reasons.RUN_OVER:
        return Say("False", reasons.ADMISSION_REFUSED, words)
    return now._replace(message=f"{now.message}{ALSO}{words}")


def _of_waits(said: Mapping[str, Say | None], words: str) -> dict[str, Say | None]:
    """Conditions that wait for removals, with the reason why these do not come."""
    waits = {life: one for life, waits in _WAITS if (one := said.get(life)) is not None and one.reason == waits}
    return {life: one._replace(message=f"{one.message}; {words}") for life, one in waits.items()}


def _told(undone: list[Refusal]) -> str:
    found = [_one(each) for each in undone[:SHOWN]]
    return ALSO.join(found) + (f" and {len(undone) - SHOWN} more" if len(undone) > SHOWN else "")


def _one(refusal: Refusal) -> str:
    what = f"{refusal.ref.kind} {refusal.ref.name} cannot {refusal.doing}"
    return admission_limits.kept_out(what, shorten(refusal.text, TEXT_MAX), "the run").message
