"""Memory between the passes over one run, and the status of a run with refused writes.

The memory contains facts for the next pass that no object in the cluster contains. After refused writes, the status must not record the
missing objects as created.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rlrun.runtime.printable import shorten_text
from rlrun_operator.decide.reading import read_status
from rlrun_operator.kube.client import ApiError
from rlrun_operator.state import MADE, Decision, EventRecord, Manifest, Refusal, RefusalKind, TeamDefaults
from rlrun_operator.status import claim_messages, reasons
from rlrun_operator.status.conditions import raw_conditions, run_phase


@dataclass(frozen=True)
class Remembered:
    """Refusals of one kind, with the conditions under which they are still valid."""

    refusals: tuple[Refusal, ...]
    facts: tuple[object, ...] = ()
    """Facts of the run at the refusal (`relevant_facts`). The refusals are valid while these facts are unchanged."""
    until: float = math.inf
    """End of its validity (steady clock)."""
    tries: int = 0
    """Number of refused attempts in a row, for the backoff."""
    child: Manifest | None = None
    """Child that is invalid, or whose name a foreign object has; None for other kinds."""


@dataclass
class RunMemory:
    """Memory of the passes over one run."""

    refusals: dict[RefusalKind, Remembered] = field(default_factory=dict)
    """Refused writes of earlier passes. A new refusal replaces the earlier one of its kind."""
    access: str | None = None
    """Hash of the API server's addresses in the policy that this process last applied for the run (`Observed.access`)."""
    repaired_at: float = -math.inf
    """Time of the last repair of a part (steady clock)."""
    asked_at: float = -math.inf
    """Time of the last live read of a Lease without recent reports (steady clock)."""
    written_at: float = -math.inf
    """Time of the last write of the status (steady clock)."""
    sent: tuple[Manifest, Manifest] | None = None
    """The status written last, and the status that the API server stored. They differ if another version of the CRD drops fields; without
    this pair, each pass would write the status again."""

    def valid_refusals(self, run: Manifest, defaults: TeamDefaults | None, clock: float) -> Iterator[Refusal]:
        """Return the refusals that still hold for the current state of the run."""
        for kind, known in self.refusals.items():
            if known.facts == relevant_facts(kind, run, defaults) and clock < known.until:
                yield from known.refusals

    def refusals_of(self, kind: RefusalKind) -> tuple[Refusal, ...]:
        """Return the refusals of a kind, valid or not."""
        known = self.refusals.get(kind)
        return known.refusals if known is not None else ()


def relevant_facts(kind: RefusalKind, run: Manifest, defaults: TeamDefaults | None) -> tuple[object, ...]:
    """Return the facts of a run that a refusal depends on.

    An invalid child depends on the sources of its manifest: the specification and the namespace's defaults. A taken name depends on the
    attempt too, because another attempt may not need the name. A lost API key depends only on the run's UID, and other kinds depend on no
    facts.
    """
    metadata = run["metadata"]
    if kind == "invalid":
        return metadata["uid"], metadata.get("generation", 0), defaults.mark if defaults is not None else None
    if kind == "name-taken":
        return metadata["uid"], metadata.get("generation", 0), (run.get("status") or {}).get("attempt")
    return (metadata["uid"],) if kind == "key-lost" else ()


_OF_EDITS = ("observedGeneration",)
"""Fields that show that an edit has taken effect."""
_OF_LIFE = (reasons.SUSPENDED, reasons.RESTARTING, reasons.COMPLETE, reasons.FAILED)
"""Lifecycle conditions: whether the run is suspended, restarting, complete or failed."""


def events_of(refused: Iterable[Refusal], namespace: str) -> list[Manifest]:
    """Return events for objects that cannot be created, in the form of a controller's FailedCreate events."""
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
    if not (error.is_withheld or error.refused):
        return None
    refused = claim_messages.kept_out(f"the operator cannot {error.what}", error.message, "the run")
    return EventRecord("Warning", reasons.REQUEST_REFUSED, refused.message)


def report_waiting(decision: Decision, run: Manifest, *, made: bool) -> Decision:
    """Return the status and events of a decision with refused writes, without fields that record these writes as done.

    `made`: whether all objects to create and apply exist. A missing pod does not count: it is created last, and nothing depends on it.
    """
    if made:
        return Decision(status=decision.status, urgency=decision.urgency, events=decision.events)
    before: Mapping[str, object] = run.get("status") or {}
    # Within one attempt, the new status is kept without the fields that show an edit as done. If the attempt or the lifecycle changes, the
    # previous status is kept, with the new reason, message and conditions.
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
    """Return whether an attempt runs, and neither its number nor a lifecycle condition changes. Then only an edit can be unfinished."""

    def read_state(status: Mapping[str, object]) -> list[object]:
        life = [(c.get("type"), c.get("status")) for c in raw_conditions(status) if c.get("type") in _OF_LIFE]
        return [status.get("attempt"), status.get("launchedAttempt"), life]

    # Both numbers are equal, and not None.
    launched = before.get("attempt") == before.get("launchedAttempt") is not None
    return launched and read_state(before) == read_state(after)


def _with_previous_life(before: Mapping[str, object], after: Mapping[str, object]) -> list[Manifest]:
    """Return the new conditions, but keep the previous lifecycle conditions (`_OF_LIFE`), because the new attempt has not started.

    The new conditions get the observedGeneration of the previous status, because an edit that waits has not taken effect.
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
