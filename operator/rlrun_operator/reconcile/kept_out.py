"""Report of a run some of whose objects admission keeps out: what is not there must not be recorded as done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlrun.defaults.words import shorten_text
from rlrun_operator.decide.reading.written_status import read_status
from rlrun_operator.kube.client import ApiError
from rlrun_operator.state import MADE, Decision, EventRecord, Manifest, Refusal
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import raw_conditions, run_phase

_OF_EDITS = ("observedGeneration",)
"""Fields by which an edit is known to be acted on."""
_OF_LIFE = (reasons.SUSPENDED, reasons.RESTARTING, reasons.COMPLETE, reasons.FAILED)


def events_of(refused: Iterable[Refusal], namespace: str) -> list[Manifest]:
    """Objects that cannot be made, as a controller would report it."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Event",
            "type": "Warning",
            "reason": "FailedCreate",
            "message": each.text,
            "involvedObject": {"kind": each.ref.kind, "name": each.ref.name, "namespace": namespace},
        }
        for each in refused
        if each.doing == MADE
    ]


def request_refused(error: ApiError) -> EventRecord | None:
    """Event for a refusal that no status can report, as nothing can be done of the run: of the status itself, or of a read.

    None: it may pass by itself, as a conflict does.
    """
    if not (error.withheld or error.refused):
        return None
    said = admission_limits.kept_out(f"the operator cannot {error.what}", error.message, "the run")
    return EventRecord("Warning", reasons.REQUEST_REFUSED, said.message)


def report_waiting(decision: Decision, run: Manifest, *, made: bool) -> Decision:
    """Only the report of a decision that waits for admission. It must not record as done what was not done."""
    if made:
        return Decision(status=decision.status, urgency=decision.urgency, events=decision.events)
    before: Mapping[str, object] = run.get("status") or {}
    status, goes_on = decision.status, _goes_on(before, decision.status)
    conditions = _where_it_was(before, status)
    then = read_status({**before, "conditions": conditions})
    told = {name: status[name] for name in ("reason", "message") if name in status}
    seen = {name: before[name] for name in _OF_EDITS if name in before}
    rest = {name: value for name, value in status.items() if name not in _OF_EDITS} if goes_on else before
    now = run_phase(then.conditions, then.attempt)
    return Decision(
        status={**rest, **seen, **told, "phase": now, "conditions": conditions},
        urgency=decision.urgency,
        events=decision.events if goes_on else (),
    )


def _goes_on(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """True if an attempt runs, and neither it nor the run's life changes: only its edit can be what is not done."""

    def read_state(status: Mapping[str, object]) -> list[object]:
        life = [(c.get("type"), c.get("status")) for c in raw_conditions(status) if c.get("type") in _OF_LIFE]
        return [status.get("attempt"), status.get("launchedAttempt"), life]

    whole = before.get("attempt") == before.get("launchedAttempt") is not None
    return whole and read_state(before) == read_state(after)


def _where_it_was(before: Mapping[str, object], after: Mapping[str, object]) -> list[Manifest]:
    """The new conditions, but for those that say where the run is in its life: the attempt that they speak of has not begun.

    They speak of no later generation than the status does: an edit that waits is not acted on.
    """
    kept = {c["type"]: c for c in raw_conditions(before) if c.get("type") in _OF_LIFE}
    if (resting := kept.get(reasons.SUSPENDED, {})).get("status") == "True":
        message = shorten_text(f"the run stays suspended: {after.get('message', '')}")
        kept[reasons.SUSPENDED] = {**resting, "message": message}
    seen = {name: before[name] for name in _OF_EDITS if name in before}
    found = [c for c in raw_conditions(after) if c["type"] not in kept]
    new = [{name: value for name, value in c.items() if name != "observedGeneration"} | seen for c in found]
    order = list(reasons.CONDITION_TYPES)
    return sorted([*new, *kept.values()], key=lambda condition: order.index(condition["type"]))
