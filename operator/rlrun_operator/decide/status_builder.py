"""Decision from what it says: the whole status, and the urgency of its writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.api.status import (
    Condition,
    InferenceStatus,
    RestartStatus,
    RLRunStatus,
    RoleStatus,
    SharedWithStatus,
    SpotStatus,
    TrainerStatus,
)
from rlrun.runtime.printable import printable
from rlrun_operator.decide import lifetime, queueing
from rlrun_operator.decide.cost import budget, split
from rlrun_operator.decide.objects import growth, refused
from rlrun_operator.decide.reading.written_status import read_status
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, attempt_number
from rlrun_operator.pods import Pod
from rlrun_operator.state import NO_ACTIONS, Actions, Decision, Json, Manifest, Urgency
from rlrun_operator.status import reasons, restart_time
from rlrun_operator.status.change import UNSET, StatusChange, combined
from rlrun_operator.status.conditions import Say, find, foremost, is_true, phase, raw_conditions, write
from rlrun_operator.status.events import events
from rlrun_operator.status.progress import Report, is_training, read_lease

TEXT_MAX = 4000
"""Characters of any text in the status."""
_AT_ONCE = ("phase", "attempt", "launchedAttempt", "restarts", "lastFailure", "observedGeneration", "nextRetryTime")
_MERE_PROGRESS = ("progress", "checkpoint", "steps", "results", "cost")


def finish(
    case: Case,
    said: Mapping[str, Say | None],
    change: StatusChange,
    actions: Actions = NO_ACTIONS,
    *,
    training: bool = False,
) -> Decision:
    """The decision with its status, urgency and events.

    Args:
        case: what was decided about.
        said: conditions that are spoken of; the others stay as they were.
        change: fields of the status that change.
        actions: what is done beside.
        training: whether the current attempt has trained a step.
    """
    new = status(case, said, change, training=training)
    written, before = document(new), case.observed.run.get("status") or {}
    return Decision(
        status=written,
        # A pass that follows at once acts on what this one puts on record: held back, it would decide the same again and again.
        urgency="now" if actions.wake_in == 0.0 else urgency(before, written),
        dry_run=tuple(actions.dry_run),
        create=tuple(actions.create),
        apply=tuple(actions.apply),
        annotate=tuple(actions.annotate),
        scale=tuple(actions.scale),
        delete=tuple(actions.delete),
        repair=tuple(actions.repair),
        events=events(case.past, new, trains=case.trains) if written != before else (),
        wake_in=actions.wake_in,
        look_up=actions.look_up,
    )


def status(case: Case, said: Mapping[str, Say | None], change: StatusChange, *, training: bool) -> RLRunStatus:
    """The new status; arguments as of `finish`."""
    past = case.past
    if reasons.SUSPENDED not in said and find(past.conditions, reasons.SUSPENDED) is not None:
        said = {**said, reasons.SUSPENDED: Say("False", reasons.NOT_SUSPENDED, "the run is not suspended")}
    said = refused.noted(case, budget.noted(case, queueing.noted(case, growth.noted(case, said))))
    born = max((pod.created_at for pod in case.group), default=0.0)
    conditions = write(past.conditions, said, generation=case.generation, now=case.now, born=born)
    kstatus = _kstatus(conditions, training)
    conditions = write(conditions, kstatus, generation=case.generation, now=case.now, born=born)
    first = foremost(conditions)
    attempt = past.attempt if change.attempt is UNSET else change.attempt
    follows = StatusChange(
        observed_generation=case.generation,
        conditions=conditions,
        phase=phase(conditions, attempt),
        reason=first.reason if first else None,
        message=first.message if first else None,
        queue=queueing.place(case, conditions),
        guests=case.joined_guests or None,
        results=_results(case, attempt),
    )
    new = combined(follows, lifetime.active(past, conditions, attempt, case.now), change).applied_to(past)
    new = queueing.sized(case, new)
    columns = StatusChange(
        last_restart=_restart(case, conditions, attempt),
        storage=growth.sized(case, new.storage),
        steps=f"{new.progress.step}/{new.progress.total_steps}",
        trainer_ready=f"{new.trainer.ready}/{new.trainer.desired}",
        inference_ready=f"{new.inference.ready}/{new.inference.desired}",
    )
    new = columns.applied_to(new)
    return StatusChange(cost=split.counted(case, new)).applied_to(new)


def _restart(case: Case, conditions: Sequence[Condition], attempt: int) -> RestartStatus | None:
    """Time of the last restart, by phase."""
    was, restarting = is_true(case.past.conditions, reasons.RESTARTING), find(conditions, reasons.RESTARTING)
    now = restarting is not None and restarting.status == "True"
    past = case.past.last_restart
    if not now and (past is None or past.total_seconds is not None):
        return past
    heard = read_lease(case.observed.lease, attempt)
    pods = [pod for pod in case.pods_of_attempt(attempt) if pod.role != "inference"]
    wanted = 1 + (case.wanted.trainers if case.trains and case.host_name is None else 0)
    over = (reasons.SUSPENDED, reasons.COMPLETE, reasons.FAILED)
    look = restart_time.Look(
        was_restarting=was,
        restarting=now,
        ending=restarting is not None and restarting.reason == reasons.PODS_ENDING,
        attempt=attempt,
        scheduled=len(pods) >= wanted and all(pod.node is not None for pod in pods),
        running=len(pods) >= wanted and all(pod.has_started for pod in pods),
        trained=is_training(heard),
        over=any(is_true(conditions, kind) for kind in over),
        start=heard.start if heard is not None else {},
    )
    return restart_time.after(past, look, case.now)


def _results(case: Case, attempt: int) -> list[str] | None:
    """Results that the orchestrator has measured; between two attempts, those of the last one."""
    heard = read_lease(case.observed.lease, attempt)
    return (list(heard.results) if heard is not None else None) or case.past.results


def _kstatus(conditions: Sequence[Condition], training: bool) -> dict[str, Say]:
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


def document(new: RLRunStatus) -> Json:
    """The status as it is written: every text in it of bounded length, and such that a terminal shows it."""
    written = new.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: _plain(value) for name, value in written.items()}


def _plain(value: object) -> object:
    if isinstance(value, str):
        text = printable(value, lines=True)
        return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def roles(case: Case, attempt: int, report: Report | None, *, over: bool = False) -> StatusChange:
    """Desired and ready pods of each role, a guest's trainer and engines being its host's; `over`: none is desired any more."""
    wanted, pods = case.wanted, case.pods_of_attempt(attempt)
    ready = {
        role: sum(1 for p in pods if p.role == role and p.ready) for role in ("trainer", "inference", "orchestrator")
    }
    version = report.policy_version if report is not None else case.past.inference.weight_version
    orchestrator = RoleStatus(desired=0 if over else 1, ready=ready["orchestrator"])
    if case.host_name is not None:
        hosts = read_status((case.observed.host or {}).get("status") or {})
        engines = InferenceStatus() if over else hosts.inference
        return StatusChange(
            trainer=TrainerStatus()
            if over
            else TrainerStatus(desired=hosts.trainer.desired, ready=hosts.trainer.ready),
            inference=InferenceStatus(desired=engines.desired, ready=engines.ready, weight_version=version),
            orchestrator=orchestrator,
            shared_with=shared_with(case),
        )
    return StatusChange(
        trainer=_trainer(case, ready["trainer"], over=over),
        inference=InferenceStatus(
            desired=0 if over else wanted.engines,
            ready=ready["inference"],
            weight_version=version,
            reason=case.past.inference.reason if case.autoscales else None,
            selector=f"{RUN_LABEL}={case.names.run},{ROLE_LABEL}=inference" if case.serves else None,
            spot=_spot(case, pods, over=over),
        ),
        orchestrator=orchestrator,
    )


def _spot(case: Case, pods: Sequence[Pod], *, over: bool) -> SpotStatus | None:
    """Engines on interruptible nodes; None: the run has none."""
    past = case.past.inference.spot
    if not (case.has_spot or (case.spec is None and past is not None)):
        return None
    kept = {"lost": past.lost, "last_loss": past.last_loss} if past is not None else {}
    ready = sum(1 for pod in pods if pod.spot and pod.ready)
    return SpotStatus(desired=0 if over else case.wanted.spot, ready=ready).model_copy(update=kept)


def _trainer(case: Case, ready: int, *, over: bool) -> TrainerStatus:
    """The trainer's pods, and why they are fewer than `replicas`: on record until another attempt has all of them."""
    past, size, spec = case.past.trainer, case.wanted.trainers, case.spec
    if over or not case.trains:
        return TrainerStatus(desired=0, ready=ready)
    update: dict[str, object] = {"desired": size, "ready": ready}
    if case.beginning and past.size is not None and spec is not None:
        whole = size == spec.trainer.replicas  # by an edit: a growth has taken the size off the record before
        update |= (
            dict.fromkeys(("size", "reason", "changed", "grow_time", "grown_from", "growths"))
            if whole
            else {"size": size}
        )
    return past.model_copy(update=update | ({"waiting_on": None} if case.beginning else {}))


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


def urgency(old: Manifest, new: Manifest) -> Urgency:
    """Longest delay before the change is written."""
    changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    if not old or changed & set(_AT_ONCE) or _truth(old) != _truth(new):
        return "now"
    others = (old.get("cost") or {}).get("pods") != (new.get("cost") or {}).get("pods")
    return "progress" if changed <= set(_MERE_PROGRESS) and not others else "soon"


def _truth(document: Manifest) -> dict[str, tuple[object, object]]:
    """The conditions that ask for action, or report one that is over at once; readiness of pods is not among them and may wait."""
    acted_on = (
        reasons.ADMITTED,
        reasons.CONFIGURATION_VALID,
        reasons.RESTARTING,
        reasons.SUSPENDED,
        reasons.COMPLETE,
        reasons.FAILED,
        reasons.STALLED,
        reasons.CHILDREN_INTACT,
        reasons.WITHIN_BUDGET,
    )
    return {
        c["type"]: (c.get("status"), c.get("reason")) for c in raw_conditions(document) if c.get("type") in acted_on
    }
