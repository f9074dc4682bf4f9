"""Report of a run some of whose objects admission keeps out: what is not there must not be recorded as done."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.defaults.words import shorten
from rlrun_operator.decide.reading.written_status import read_status
from rlrun_operator.reconcile.apply import KeptOutError
from rlrun_operator.state import Decision, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import phase, raw_conditions

_OF_LIFE = (reasons.SUSPENDED, reasons.RESTARTING, reasons.COMPLETE, reasons.FAILED)


def kept_out_event(error: KeptOutError) -> Manifest:
    metadata = error.manifest["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": "Warning",
        "reason": "FailedCreate",
        "message": str(error),
        "involvedObject": {
            "kind": error.manifest["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
        },
    }


def waiting(decision: Decision, run: Manifest, *, rest_done: bool) -> Decision:
    """Only the report of a decision that waits for admission. It must not record as done what was not done."""
    status = decision.status
    if not rest_done:
        before: Mapping[str, object] = run.get("status") or {}
        told = {name: status[name] for name in ("reason", "message") if name in status}
        conditions = _where_it_was(before, status)
        then = read_status({**before, "conditions": conditions})
        now = phase(then.conditions, then.attempt)
        status = {**before, **told, "phase": now, "conditions": conditions}
    return Decision(status=status, urgency=decision.urgency, events=decision.events if rest_done else ())


def _where_it_was(before: Mapping[str, object], after: Mapping[str, object]) -> list[Manifest]:
    """The new conditions, but for those that say where the run is in its life: the attempt that they speak of has not begun.

    They speak of no later generation than the status does: an edit that waits is not acted on.
    """
    kept = {c["type"]: c for c in raw_conditions(before) if c.get("type") in _OF_LIFE}
    if (resting := kept.get(reasons.SUSPENDED, {})).get("status") == "True":
        message = shorten(f"the run stays suspended: {after.get('message', '')}")
        kept[reasons.SUSPENDED] = {**resting, "message": message}
    seen = {name: before[name] for name in ("observedGeneration",) if name in before}
    found = [c for c in raw_conditions(after) if c["type"] not in kept]
    new = [{name: value for name, value in c.items() if name != "observedGeneration"} | seen for c in found]
    order = list(reasons.CONDITION_TYPES)
    return sorted([*new, *kept.values()], key=lambda condition: order.index(condition["type"]))
