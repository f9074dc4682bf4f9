"""Status of a run with refused writes. The status must not record missing objects as created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlrun.defaults.words import shorten_text
from rlrun_operator.decide.reading.written_status import read_status
from rlrun_operator.kube.client import ApiError
from rlrun_operator.state import MADE, Decision, EventRecord, Manifest, Refusal
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import raw_conditions, run_phase

_OF_EDITS = ("observedGeneration",)
"""Fields that show that an edit has taken effect."""
_OF_LIFE = (reasons.SUSPENDED, reasons.RESTARTING, reasons.COMPLETE, reasons.FAILED)


def events_of(refused: Iterable[Refusal], namespace: str) -> list[Manifest]:
    """Return events for objects that cannot be created, like those of a controller."""
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
    """Return the event for a refused write of the status, or a refused read: the status cannot report these.

    Returns:
        the event, or None if the error may disappear by itself, as a conflict does.
    """
    if not (error.withheld or error.refused):
        return None
    refused = admission_limits.kept_out(f"the operator cannot {error.what}", error.message, "the run")
    return EventRecord("Warning", reasons.REQUEST_REFUSED, refused.message)


def report_waiting(decision: Decision, run: Manifest, *, made: bool) -> Decision:
    """Return the status and events of a decision with refused writes, without fields that record these writes as done.

    `made`: whether all objects to create and apply exist, except a pod.
    """
    if made:
        return Decision(status=decision.status, urgency=decision.urgency, events=decision.events)
    before: Mapping[str, object] = run.get("status") or {}
    status, same_attempt = decision.status, _is_same_attempt(before, decision.status)
    conditions = _with_previous_life(before, status)
    then = read_status({**before, "conditions": conditions})
    explained = {name: status[name] for name in ("reason", "message") if name in status}
    seen = {name: before[name] for name in _OF_EDITS if name in before}
    rest = {name: value for name, value in status.items() if name not in _OF_EDITS} if same_attempt else before
    now = run_phase(then.conditions, then.attempt)
    return Decision(
        status={**rest, **seen, **explained, "phase": now, "conditions": conditions},
        urgency=decision.urgency,
        events=decision.events if same_attempt else (),
    )


def _is_same_attempt(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Return whether an attempt runs, and neither its number nor the life of the run changes: then only an edit can be unfinished."""

    def read_state(status: Mapping[str, object]) -> list[object]:
        life = [(c.get("type"), c.get("status")) for c in raw_conditions(status) if c.get("type") in _OF_LIFE]
        return [status.get("attempt"), status.get("launchedAttempt"), life]

    launched = before.get("attempt") == before.get("launchedAttempt") is not None
    return launched and read_state(before) == read_state(after)


def _with_previous_life(before: Mapping[str, object], after: Mapping[str, object]) -> list[Manifest]:
    """Return the new conditions, but keep the previous ones about the life of the run, because the new attempt has not started.

    Their observedGeneration stays that of the status: an edit that waits has not taken effect.
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
