"""From a decision to its report: the whole status, the urgency of its writing, and the events that a change is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlrun.api.status import RLRunStatus, RoleStatus, SharedWithStatus
from rlrun.protocol.printable import printable
from rlrun_operator.decide import growth, lifetime
from rlrun_operator.decide.snapshot import Case, read_status
from rlrun_operator.names import attempt_number
from rlrun_operator.state import EventRecord, Urgency
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import Say, find, foremost, is_true, phase, raw_conditions, write
from rlrun_operator.status.progress import Report, read_lease
from rlrun_operator.times import seconds_of
from rlrun_operator.validate_spec import counted, shorten

TEXT_MAX = 4000
"""Characters of any text in the status."""
EVENT_MAX = 1000
"""Characters of an event's message; the API's limit is 1024."""
_AT_ONCE = ("phase", "attempt", "launchedAttempt", "restarts", "lastFailure", "observedGeneration", "nextRetryTime")
_MERE_PROGRESS = ("progress", "checkpoint", "steps", "results")


def status(case: Case, said: Mapping[str, Say | None], updates: Mapping[str, Any], *, training: bool) -> RLRunStatus:
    """The new status.

    Args:
        case: what was decided about.
        said: conditions that are spoken of; the others stay as they were.
        updates: fields of the status that change.
        training: whether the current attempt has trained a step.
    """
    past = case.past
    if reasons.SUSPENDED not in said and find(past.conditions, reasons.SUSPENDED) is not None:
        said = {**said, reasons.SUSPENDED: Say("False", reasons.NOT_SUSPENDED, "the run is not suspended")}
    said = growth.noted(case, said)
    born = max((pod.created_at for pod in case.group), default=0.0)
    conditions = write(past.conditions, said, generation=case.generation, now=case.now, born=born)
    kstatus = _kstatus(conditions, training)
    conditions = write(conditions, kstatus, generation=case.generation, now=case.now, born=born)
    first = foremost(conditions)
    new = past.model_copy(
        update={
            "observed_generation": case.generation,
            "conditions": conditions,
            "phase": phase(conditions, updates.get("attempt", past.attempt)),
            "reason": first.reason if first else None,
            "message": first.message if first else None,
            "guests": case.joined_guests or None,
            "results": _results(case, updates.get("attempt", past.attempt)),
            **lifetime.active(past, conditions, updates.get("attempt", past.attempt), case.now),
            **updates,
            "storage": growth.sized(case, updates.get("storage", past.storage)),
        }
    )
    return new.model_copy(
        update={
            "steps": f"{new.progress.step}/{new.progress.total_steps}",
            "trainer_ready": f"{new.trainer.ready}/{new.trainer.desired}",
            "inference_ready": f"{new.inference.ready}/{new.inference.desired}",
        }
    )


def _results(case: Case, attempt: int) -> list[str] | None:
    """What the orchestrator has measured; between two attempts, what the last one has."""
    heard = read_lease(case.observed.lease, attempt)
    return (list(heard.results) if heard is not None else None) or case.past.results


def _kstatus(conditions: list[Any], training: bool) -> dict[str, Say]:
    failed, valid = find(conditions, reasons.FAILED), find(conditions, reasons.CONFIGURATION_VALID)
    host = find(conditions, reasons.HOST_AVAILABLE)
    stuck = (
        failed
        if is_true(conditions, reasons.FAILED)
        else valid
        if valid is not None and valid.status == "False"
        else host
        if host is not None and host.reason in reasons.HOST_NEEDS_A_PERSON
        else None
    )
    first = foremost(conditions)
    reason, message = (first.reason, first.message) if first is not None else (reasons.SCHEDULING, "")
    over = any(is_true(conditions, kind) for kind in (reasons.COMPLETE, reasons.FAILED, reasons.SUSPENDED))
    steady = training and not is_true(conditions, reasons.RESTARTING) and find(conditions, reasons.COMPLETE) is None
    return {
        reasons.RECONCILING: Say("False" if over or steady else "True", reason, message),
        reasons.STALLED: Say("True", stuck.reason, stuck.message)
        if stuck is not None
        else Say("False", reasons.NOT_FAILED, "nothing needs a person"),
    }


def document(new: RLRunStatus) -> dict[str, Any]:
    """The status as it is written: every text in it of bounded length, and such that a terminal shows it."""
    result: dict[str, Any] = _plain(new.model_dump(mode="json", by_alias=True, exclude_none=True))
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        text = printable(value, lines=True)
        return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def roles(case: Case, attempt: int, report: Report | None, *, over: bool = False) -> dict[str, Any]:
    """Desired and ready pods of each role, a guest's trainer and engines being its host's; `over`: none is desired any more."""
    wanted, pods = case.wanted, case.pods_of_attempt(attempt)
    ready = {
        role: sum(1 for p in pods if p.role == role and p.ready) for role in ("trainer", "inference", "orchestrator")
    }
    version = report.policy_version if report is not None else case.past.inference.weight_version
    orchestrator = RoleStatus(desired=0 if over else 1, ready=ready["orchestrator"])
    if case.host_name is not None:
        hosts = read_status((case.observed.host or {}).get("status") or {})
        return {
            "trainer": RoleStatus() if over else hosts.trainer,
            "inference": (RoleStatus() if over else hosts.inference).model_copy(update={"weight_version": version}),
            "orchestrator": orchestrator,
            "shared_with": shared_with(case),
        }
    return {
        "trainer": RoleStatus(desired=0 if over else wanted.trainers, ready=ready["trainer"]),
        "inference": RoleStatus(
            desired=0 if over else wanted.engines, ready=ready["inference"], weight_version=version
        ),
        "orchestrator": orchestrator,
    }


def shared_with(case: Case) -> SharedWithStatus | None:
    """A guest's host, and the life of it that the current attempt belongs to."""
    if case.host_name is None:
        return None
    mark, before = case.host_mark(case.attempt), case.past.shared_with
    if mark is None and before is not None and before.run == case.host_name:
        return before
    return SharedWithStatus(
        run=case.host_name, attempt=attempt_number(mark.rpartition("/")[2]) if mark is not None else None
    )


def urgency(old: Mapping[str, Any], new: Mapping[str, Any]) -> Urgency:
    """Longest delay before the change is written."""
    changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    if not old or changed & set(_AT_ONCE) or _truth(old) != _truth(new):
        return "now"
    return "progress" if changed <= set(_MERE_PROGRESS) else "soon"


def _truth(document: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The conditions that ask for action, or tell of one that is over at once; readiness of pods is not among them and may wait."""
    acted_on = (
        reasons.CONFIGURATION_VALID,
        reasons.RESTARTING,
        reasons.SUSPENDED,
        reasons.COMPLETE,
        reasons.FAILED,
        reasons.STALLED,
        reasons.CHILDREN_INTACT,
    )
    return {
        c["type"]: (c.get("status"), c.get("reason")) for c in raw_conditions(document) if c.get("type") in acted_on
    }


def events(old: RLRunStatus, new: RLRunStatus, *, trains: bool = True) -> tuple[EventRecord, ...]:
    """Events between two statuses. At most three from creation to the first step of a healthy run.

    Args:
        old: the status before.
        new: the status that is written.
        trains: whether the run trains; else its steps are answers.
    """
    return tuple(EventRecord(e.type, e.reason, shorten(e.message, EVENT_MAX)) for e in _events(old, new, trains))


def _events(old: RLRunStatus, new: RLRunStatus, trains: bool) -> Iterator[EventRecord]:
    yield from _of_failure(old, new)
    if new.attempt > old.attempt:
        engines = f", {counted(new.inference.desired, 'engine')}" if new.inference.desired else ""
        what = f"{counted(new.trainer.desired, 'trainer pod')}{engines} and the orchestrator"
        if not trains:
            what = f"{engines.removeprefix(', ')} and the orchestrator"
        if new.shared_with is not None:
            what = f"the orchestrator, with trainer and engines of run {new.shared_with.run}"
        yield EventRecord("Normal", reasons.ATTEMPT_STARTED, f"attempt {new.attempt}: {what}")
    yield from _of_nodes(old, new)
    yield from _of_configuration(old, new)
    yield from _of_inference(old, new)
    resumed, before = new.checkpoint.resumed_from_step, old.checkpoint.resumed_from_step
    if resumed and before is None:
        lost = new.checkpoint.steps_lost_total - old.checkpoint.steps_lost_total
        message = f"attempt {new.attempt} resumed from the checkpoint of step {resumed}; {counted(lost, 'step')} to train again"
        if not trains:
            message = f"attempt {new.attempt} has found {counted(resumed, 'answer')}, and asks the rest"
        yield EventRecord("Normal", reasons.RESUMED, message)
    if new.phase == "Running" and old.phase != "Running":
        message = f"attempt {new.attempt} trains: step {new.progress.step} is done"
        if not trains:
            message = f"attempt {new.attempt} asks: {new.steps} answers are there"
        yield EventRecord("Normal", reasons.TRAINING if trains else reasons.ANSWERING, message)
    yield from _of_problems(old, new)
    if new.phase in ("Suspending", "Suspended") and new.phase != old.phase:
        yield EventRecord("Normal", new.phase, _said(new, reasons.SUSPENDED)[1])
    if new.restart_requested_at != old.restart_requested_at and old.attempt and seconds_of(new.restart_requested_at):
        yield EventRecord(
            "Normal", reasons.RESTART_REQUESTED, f"asked for at {new.restart_requested_at}; it does not count"
        )
    rotation = new.key_rotation_requested_at
    if rotation != old.key_rotation_requested_at and old.attempt and seconds_of(rotation):
        told = f"asked for at {rotation}; the next attempt begins with another API key, and does not count"
        yield EventRecord("Normal", reasons.KEY_ROTATION_REQUESTED, told)
    if new.phase == "Complete" and old.phase != "Complete":
        steps = f"all {new.progress.total_steps} steps are trained"
        measured = f"{new.steps} answers: {'; '.join(new.results or ())}"
        yield EventRecord("Normal", reasons.COMPLETED, steps if trains else measured)


def _of_failure(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    failure, failed = new.last_failure, new.phase == "Failed" and old.phase != "Failed"
    if failed:
        reason, message = _said(new, reasons.FAILED)
        yield EventRecord("Warning", reason, message)
    elif failure is not None and failure != old.last_failure:
        told = f"attempt {failure.attempt}: {failure.role} pod {failure.pod_name}: {failure.reason}: {failure.message}"
        when = f"; next attempt not before {new.next_retry_time}" if new.next_retry_time else "; restarting at once"
        if failure.reason == reasons.NUMBER_TAKEN:
            yield EventRecord("Normal", reasons.ATTEMPT_TAKEN, told)
        elif failure.counted:
            count = f"; restart {new.restarts_counted_towards_max} that counts"
            yield EventRecord("Warning", reasons.ATTEMPT_FAILED, told + count + when)
        else:
            yield EventRecord("Warning", reasons.DISRUPTED, f"{told}; the restart does not count{when}")


def _of_nodes(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    known = {node.name for node in old.excluded_nodes or ()}
    for node in new.excluded_nodes or ():
        if node.name not in known:
            message = f"node {node.name} is left out until {node.until}: {node.reason}"
            yield EventRecord("Warning", reasons.NODE_EXCLUDED, message)


def _of_configuration(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    was, _ = _said(old, reasons.CONFIGURATION_VALID)
    reason, message = _said(new, reasons.CONFIGURATION_VALID)
    if reason == was:
        return
    if reason == reasons.CHANGE_PENDING:
        yield EventRecord("Normal", reason, message)
    elif reason in (reasons.INVALID_CONFIGURATION, reasons.FORBIDDEN) and new.phase != "Failed":
        yield EventRecord("Warning", reason, message)


def _of_inference(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    if new.phase in ("Completing", "Complete", "Failed"):
        return
    was, now = (
        is_true(old.conditions, reasons.INFERENCE_AVAILABLE),
        is_true(new.conditions, reasons.INFERENCE_AVAILABLE),
    )
    if now and not was:
        yield EventRecord("Normal", reasons.ENGINES_AVAILABLE, _said(new, reasons.INFERENCE_AVAILABLE)[1])
    elif was and not now:
        yield EventRecord("Warning", reasons.ENGINES_UNAVAILABLE, _said(new, reasons.INFERENCE_AVAILABLE)[1])
    before, after = old.inference.desired, new.inference.desired
    if before and after != before and new.shared_with is None:
        yield EventRecord("Normal", reasons.INFERENCE_SCALED, f"inference.replicas: {before} to {after} engines")


def _of_problems(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    """The problem that matters most, once it appears; of what a running run may have beside it, each."""
    if new.reason in reasons.PROBLEMS and new.reason != old.reason:
        yield EventRecord("Warning", str(new.reason), new.message or "")
    beside = (reasons.STORAGE_READY,) if is_true(new.conditions, reasons.STORAGE_READY) else ()
    for kind in (reasons.PROGRESSING, reasons.CHECKPOINT_HEALTHY, reasons.CHILDREN_INTACT, *beside):
        was, (reason, message) = _said(old, kind)[0], _said(new, kind)
        if reason in reasons.PROBLEMS and reason not in (was, new.reason):
            yield EventRecord("Warning", reason, message)
    if _said(old, reasons.PROGRESSING)[0] == reasons.HEARTBEAT_LOST and is_true(new.conditions, reasons.PROGRESSING):
        yield EventRecord("Normal", reasons.HEARTBEAT_RESUMED, "the orchestrator renews its Lease again")


def _said(status: RLRunStatus, kind: str) -> tuple[str, str]:
    found = find(status.conditions, kind)
    return (found.reason, found.message) if found is not None else ("", "")
