"""Assembly of a decision: the complete new status, and the urgency of its write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.api.run_status import (
    Condition,
    InferenceStatus,
    RestartStatus,
    RLRunStatus,
    RoleStatus,
    SharedWithStatus,
    SpotStatus,
    TrainerStatus,
)
from rlrun.runtime.printable import escape_controls
from rlrun_operator.decide import claims, gpu_time, gpu_time_split, lifetime, queueing, repairs
from rlrun_operator.decide.reading import read_status
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, attempt_number
from rlrun_operator.pods import Pod
from rlrun_operator.state import NO_ACTIONS, Actions, Decision, Json, Manifest, Urgency, in_order
from rlrun_operator.status import reasons, run_progress
from rlrun_operator.status.conditions import (
    UNSET,
    ConditionUpdate,
    StatusChange,
    combine_changes,
    find_condition,
    foremost_condition,
    is_true,
    raw_conditions,
    run_phase,
    write_conditions,
)
from rlrun_operator.status.events import list_events
from rlrun_operator.status.run_progress import Report, is_training, read_lease

TEXT_MAX = 4000
"""Maximum number of characters of a text in the status."""
_AT_ONCE = ("phase", "attempt", "launchedAttempt", "restarts", "lastFailure", "observedGeneration", "nextRetryTime")
_MERE_PROGRESS = ("progress", "checkpoint", "steps", "results", "cost")


def finish_decision(
    run: RunSnapshot,
    updates: Mapping[str, ConditionUpdate | None],
    change: StatusChange,
    actions: Actions = NO_ACTIONS,
    *,
    training: bool = False,
) -> Decision:
    """Return the decision with its status, urgency and events.

    Args:
        run: snapshot of the run.
        updates: changed conditions by type; None removes a condition. All other conditions stay.
        change: changed fields of the status.
        actions: writes and the time of the next pass.
        training: whether the current attempt has trained a step.
    """
    new = build_status(run, updates, change, training=training)
    written, before = status_document(new), run.observed.run.get("status") or {}
    return Decision(
        status=written,
        # The next pass, which follows at once, acts on this record: with a delayed write it would decide the same again.
        urgency="now" if actions.wake_in == 0.0 else write_urgency(before, written),
        writes=in_order(actions.writes),
        events=list_events(run.past, new, is_training_run=run.is_training_run) if written != before else (),
        wake_in=actions.wake_in,
        look_up=actions.look_up,
    )


def build_status(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None], change: StatusChange, *, training: bool
) -> RLRunStatus:
    """Return the new status; for the arguments see `finish_decision`."""
    past = run.past
    if reasons.SUSPENDED not in updates and find_condition(past.conditions, reasons.SUSPENDED) is not None:
        updates = {
            **updates,
            reasons.SUSPENDED: ConditionUpdate("False", reasons.NOT_SUSPENDED, "the run is not suspended"),
        }
    # Inner functions first: the refusals of writes come last, because they are reported only if no other
    # message contains them.
    updates = repairs.with_refused_writes(
        run,
        gpu_time.with_budget_condition(
            run, queueing.with_admission_condition(run, claims.with_growth_condition(run, updates))
        ),
    )
    born = max((pod.created_at for pod in run.group), default=0.0)
    # Reconciling and Stalled summarize the other conditions, so these are written first.
    conditions = write_conditions(past.conditions, updates, generation=run.generation, now=run.now, born=born)
    kstatus = _kstatus_conditions(conditions, training)
    conditions = write_conditions(conditions, kstatus, generation=run.generation, now=run.now, born=born)
    first = foremost_condition(conditions)
    attempt = past.attempt if change.attempt is UNSET else change.attempt
    follows = StatusChange(
        observed_generation=run.generation,
        conditions=conditions,
        phase=run_phase(conditions, attempt),
        reason=first.reason if first else None,
        message=first.message if first else None,
        queue=queueing.queue_status(run, conditions),
        guests=run.joined_guests or None,
        results=_latest_results(run, attempt),
    )
    new = combine_changes(follows, lifetime.count_active_time(past, conditions, attempt, run.now), change).applied_to(
        past
    )
    # The rest reads the new status: the admitted size, the columns of kubectl, and last the cost, which
    # depends on the final state of the run.
    new = queueing.with_admitted_size(run, new)
    columns = StatusChange(
        last_restart=_restart_status(run, conditions, attempt),
        storage=claims.with_claim_size(run, new.storage),
        steps=f"{new.progress.step}/{new.progress.total_steps}",
        trainer_ready=f"{new.trainer.ready}/{new.trainer.desired}",
        inference_ready=f"{new.inference.ready}/{new.inference.desired}",
    )
    new = columns.applied_to(new)
    return StatusChange(cost=gpu_time_split.count_cost(run, new)).applied_to(new)


def _restart_status(run: RunSnapshot, conditions: Sequence[Condition], attempt: int) -> RestartStatus | None:
    """Return the duration of the last restart, by phase."""
    was, restarting = is_true(run.past.conditions, reasons.RESTARTING), find_condition(conditions, reasons.RESTARTING)
    now = restarting is not None and restarting.status == "True"
    past = run.past.last_restart
    if not now and (past is None or past.total_seconds is not None):
        return past
    report = read_lease(run.observed.lease, attempt)
    pods = [pod for pod in run.pods_of_attempt(attempt) if pod.role != "inference"]
    wanted = 1 + (run.wanted.trainers if run.is_training_run and run.host_name is None else 0)
    over = (reasons.SUSPENDED, reasons.COMPLETE, reasons.FAILED)
    look = run_progress.Look(
        was_restarting=was,
        restarting=now,
        ending=restarting is not None and restarting.reason == reasons.PODS_ENDING,
        attempt=attempt,
        scheduled=len(pods) >= wanted and all(pod.node is not None for pod in pods),
        running=len(pods) >= wanted and all(pod.has_started for pod in pods),
        trained=is_training(report),
        over=any(is_true(conditions, kind) for kind in over),
        start=report.start if report is not None else {},
    )
    return run_progress.restart_after(past, look, run.now)


def _latest_results(run: RunSnapshot, attempt: int) -> list[str] | None:
    """Return the results of the orchestrator; between two attempts, those of the last one."""
    report = read_lease(run.observed.lease, attempt)
    return (list(report.results) if report is not None else None) or run.past.results


def _kstatus_conditions(conditions: Sequence[Condition], training: bool) -> dict[str, ConditionUpdate]:
    failed, valid = find_condition(conditions, reasons.FAILED), find_condition(conditions, reasons.CONFIGURATION_VALID)
    host = find_condition(conditions, reasons.HOST_AVAILABLE)
    stuck = (
        failed
        if is_true(conditions, reasons.FAILED)
        else valid
        if valid is not None and valid.status == "False"
        else host
        if host is not None and host.reason in reasons.HOST_NEEDS_A_PERSON
        else None
    )
    first = foremost_condition(conditions)
    reason, message = (first.reason, first.message) if first is not None else (reasons.SCHEDULING, "")
    over = any(is_true(conditions, kind) for kind in (reasons.COMPLETE, reasons.FAILED, reasons.SUSPENDED))
    steady = (
        training
        and not is_true(conditions, reasons.RESTARTING)
        and find_condition(conditions, reasons.COMPLETE) is None
    )
    return {
        reasons.RECONCILING: ConditionUpdate("False" if over or steady else "True", reason, message),
        reasons.STALLED: ConditionUpdate("True", stuck.reason, stuck.message)
        if stuck is not None
        else ConditionUpdate("False", reasons.NOT_FAILED, "nothing needs a person"),
    }


def status_document(new: RLRunStatus) -> Json:
    """Return the status as JSON; all texts are bounded and printable."""
    written = new.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: _bound_texts(value) for name, value in written.items()}


def _bound_texts(value: object) -> object:
    if isinstance(value, str):
        text = escape_controls(value, lines=True)
        return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
    if isinstance(value, dict):
        return {name: _bound_texts(inner) for name, inner in value.items()}
    return [_bound_texts(inner) for inner in value] if isinstance(value, list) else value


def role_status(run: RunSnapshot, attempt: int, report: Report | None, *, over: bool = False) -> StatusChange:
    """Return desired and ready pods of each role; a guest reports its host's trainer and engines. `over`: no pods are desired any more."""
    wanted, pods = run.wanted, run.pods_of_attempt(attempt)
    ready = {
        role: sum(1 for p in pods if p.role == role and p.ready) for role in ("trainer", "inference", "orchestrator")
    }
    version = report.policy_version if report is not None else run.past.inference.weight_version
    orchestrator = RoleStatus(desired=0 if over else 1, ready=ready["orchestrator"])
    if run.host_name is not None:
        hosts = read_status((run.observed.host or {}).get("status") or {})
        engines = InferenceStatus() if over else hosts.inference
        return StatusChange(
            trainer=TrainerStatus()
            if over
            else TrainerStatus(desired=hosts.trainer.desired, ready=hosts.trainer.ready),
            inference=InferenceStatus(desired=engines.desired, ready=engines.ready, weight_version=version),
            orchestrator=orchestrator,
            shared_with=shared_with(run),
        )
    return StatusChange(
        trainer=_trainer_status(run, ready["trainer"], over=over),
        inference=InferenceStatus(
            desired=0 if over else wanted.engines,
            ready=ready["inference"],
            weight_version=version,
            reason=run.past.inference.reason if run.is_autoscaled else None,
            selector=f"{RUN_LABEL}={run.names.run},{ROLE_LABEL}=inference" if run.has_own_engines else None,
            spot=_spot_status(run, pods, over=over),
        ),
        orchestrator=orchestrator,
    )


def _spot_status(run: RunSnapshot, pods: Sequence[Pod], *, over: bool) -> SpotStatus | None:
    """Return the status of the spot engines, or None if the run has none."""
    past = run.past.inference.spot
    if not (run.has_spot or (run.spec is None and past is not None)):
        return None
    kept = {"lost": past.lost, "last_loss": past.last_loss} if past is not None else {}
    ready = sum(1 for pod in pods if pod.spot and pod.ready)
    return SpotStatus(desired=0 if over else run.wanted.spot, ready=ready).model_copy(update=kept)


def _trainer_status(run: RunSnapshot, ready: int, *, over: bool) -> TrainerStatus:
    """Return the status of the trainer, with the reason why it has fewer pods than `replicas`, until an attempt has all of them."""
    past, size, spec = run.past.trainer, run.wanted.trainers, run.spec
    if over or not run.is_training_run:
        return TrainerStatus(desired=0, ready=ready)
    update: dict[str, object] = {"desired": size, "ready": ready}
    if run.beginning and past.size is not None and spec is not None:
        whole = size == spec.trainer.replicas  # because of an edit: a growth has removed the recorded size before
        update |= (
            dict.fromkeys(("size", "reason", "changed", "grow_time", "grown_from", "growths"))
            if whole
            else {"size": size}
        )
    return past.model_copy(update=update | ({"waiting_on": None} if run.beginning else {}))


def shared_with(run: RunSnapshot) -> SharedWithStatus | None:
    """Return a guest's host with the attempt of the host that the current attempt belongs to."""
    if run.host_name is None:
        return None
    mark, before = run.host_mark(run.attempt), run.past.shared_with
    if mark is None and before is not None and before.run == run.host_name:
        return before
    return SharedWithStatus(
        run=run.host_name, attempt=attempt_number(mark.rpartition("/")[2]) if mark is not None else None
    )


def write_urgency(old: Manifest, new: Manifest) -> Urgency:
    """Return the maximum delay of the write."""
    # The first status, a change of the life of the run and every fact that another pass acts on are written
    # at once. Progress alone may wait, because every training run reports it all the time.
    changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    if not old or changed & set(_AT_ONCE) or _urgent_truths(old) != _urgent_truths(new):
        return "now"
    others = (old.get("cost") or {}).get("pods") != (new.get("cost") or {}).get("pods")
    return "progress" if changed <= set(_MERE_PROGRESS) and not others else "soon"


def _urgent_truths(document: Manifest) -> dict[str, tuple[object, object]]:
    """Return status and reason of the conditions that are written at once; the readiness of pods may wait."""
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
