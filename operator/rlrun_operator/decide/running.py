"""Supervision of an attempt whose workloads exist: its status, and the time of the next pass."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import StorageStatus
from rlrun_operator.decide import (
    claims,
    elastic_trainer,
    engine_count,
    host_run,
    interruptible_engines,
    repairs,
    stall,
    status_builder,
    workload_edits,
)
from rlrun_operator.decide.reading import is_refused
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.failures import failure_policy, node_failures
from rlrun_operator.providers import ignored_field
from rlrun_operator.state import NO_ACTIONS, SOON_SECONDS, Actions, Apply, Decision, Write
from rlrun_operator.status import claim_messages, diagnose, reasons, run_progress
from rlrun_operator.status.conditions import (
    NO_CHANGE,
    ConditionUpdate,
    StatusChange,
    attempt_started_at,
    combine_changes,
    find_condition,
    is_true,
    not_failed,
    true_since,
)
from rlrun_operator.status.wait_facts import Scene
from rlrun_operator.times import seconds_of

PATIENCE_SECONDS = 2.0
"""A healthy start passes each stage before this time; until then no wait is reported as a problem."""
EXPLAIN_SECONDS = (5.0, 60.0)
"""Seconds between two explanations of a wait, at first and after a long wait. Events and nodes are not watched."""
TAKEN_SECONDS = 10.0
"""Seconds between two checks whether a foreign object still has the name of a child."""
OVERDUE_INTERVALS = 3
"""A newest complete checkpoint older than this many intervals is overdue."""


def follow_attempt(
    run: RunSnapshot, attempt: int, change: StatusChange = NO_CHANGE, actions: Actions = NO_ACTIONS
) -> Decision:
    """Report the state of `attempt`, and keep the number of engines at the specified one.

    Args:
        run: snapshot of the run.
        attempt: number of the current attempt, or of the one that starts now.
        change: further fields of the status.
        actions: writes that start the attempt.
    """
    begins = run.past.attempt != attempt
    report = stall.read_report(run, attempt)
    scene, waits = _read_scene(run, attempt, report), _Waits(run)
    updates = _attempt_conditions(run, scene, report, waits, begins=begins)
    # The objects of a starting attempt are rendered with the current numbers. Scaling and comparisons are for
    # objects that exist.
    engine_marks, engine_scales = ([], []) if begins else engine_count.scale_pools(run, report)
    spot_engines = interruptible_engines.apply_spot_engines(run, attempt, begins=begins)
    beside = repairs.Seen({reasons.CHILDREN_INTACT: None}) if begins else repairs.compare_parts(run, attempt)
    again = _look_again(run, scene, report, waits, updates)
    wakes = [actions.wake_in, again.wake_in, beside.wake_in]
    in_hand = any(isinstance(write, Apply) for write in actions.writes)
    # An attempt whose workloads are being applied has no lost Deployment: the cache does not contain it yet.
    corrected = repairs.correct_objects(run, attempt, begins, in_hand)
    adjusted: list[Write] = [*engine_count.announce_engines(run, report), *engine_marks, *engine_scales]
    todo = Actions(
        writes=(
            *actions.writes,
            *repairs.lost_claim(run, attempt),
            *corrected,
            *spot_engines,
            *(() if begins else (*adjusted, *repairs.restore_trainer_size(run))),
            *repairs.delete_stale_pods(run, attempt),
            *interruptible_engines.remove_spot_engines(run),
            *repairs.lost_lease(run, attempt),
            *beside.repair,
        ),
        wake_in=min((w for w in wakes if w is not None), default=None),
        look_up=again.look_up,
    )
    # Each step reads the fields of the one before: the numbers of engines and trainers start from the counted
    # pods, and the writes that start the attempt have the last word.
    fields = _attempt_progress(run, attempt, report)
    fields |= combine_changes(
        engine_count.with_chosen_engines(run, report, fields), elastic_trainer.with_trainer_size(run, report, fields)
    )
    fields |= combine_changes(
        interruptible_engines.with_spot_status(run, fields, renewed=bool(spot_engines)),
        workload_edits.with_unstarted_roles(run, attempt),
        change,
    )
    of_parts = beside.updates | repairs.report_refused_update(run, corrected)
    return finish_decision(run, {**updates, **of_parts}, fields, todo, training=run_progress.is_training(report))


def _attempt_conditions(
    run: RunSnapshot, scene: Scene, report: run_progress.Report | None, waits: _Waits, *, begins: bool
) -> dict[str, ConditionUpdate]:
    """Return the conditions of an existing attempt; `begins`: it starts in this pass."""
    updates = diagnose.scene_conditions(scene, waits.patient)
    updates[reasons.SCHEDULED] = node_failures.with_excluded_nodes(updates[reasons.SCHEDULED], run.past, run.now)
    # The first that applies is reported: a foreign object with a needed name explains a stall, and a stall is
    # more urgent than a lost Lease.
    updates[reasons.PROGRESSING] = (
        _report_name_conflict(run)
        or stall.stall_condition(run, report)
        or _report_lost_lease(run)
        or _progress_condition(run, report, waits)
    )
    updates[reasons.RESTARTING] = ConditionUpdate("False", reasons.NOT_RESTARTING, "no restart is under way")
    return updates | _report_checkpoints(run, report) | standing_conditions(run, pending=not begins)


def _attempt_progress(run: RunSnapshot, attempt: int, report: run_progress.Report | None) -> StatusChange:
    """Return progress, roles, storage, excluded nodes and failure budget of the attempt."""
    measured = run_progress.measured_fields(run.past, report, run.total_steps, run.now)
    beside = StatusChange(
        storage=storage_status(run), excluded_nodes=node_failures.active_exclusions(run.past, run.now) or None
    )
    return combine_changes(
        status_builder.role_status(run, attempt, report), measured, beside, _failure_budget(run, report)
    )


def _look_again(
    run: RunSnapshot,
    scene: Scene,
    report: run_progress.Report | None,
    waits: _Waits,
    updates: Mapping[str, ConditionUpdate],
) -> Actions:
    """Time of the next pass over an attempt, and the facts that would explain its wait."""
    # Events and nodes are read only for a wait that no observed object explains, and less often the longer it
    # lasts: they are requests to the API server, not cached objects.
    patient = [kind for kind in waits.pending_kinds(updates) if waits.patient(kind)]
    unexplained = [kind for kind in waits.pending_kinds(updates) if kind not in patient]
    helps = bool(unexplained) and diagnose.facts_that_would_help(scene, updates)
    nodes = diagnose.nodes_would_help(scene, updates)
    wakes = [
        PATIENCE_SECONDS if patient else None,
        max(waits.explain_in(kind) for kind in unexplained) if helps else None,
        _until_silent(run, report),
        _until_on_record(run, updates[reasons.PODS_READY]),
        stall.wake_in(run, report),
        TAKEN_SECONDS if run.taken is not None else None,
    ]
    return Actions(
        wake_in=min((w for w in wakes if w is not None), default=None),
        look_up=frozenset(("events", "nodes") if nodes else ("events",)) if helps else frozenset(),
    )


def _failure_budget(run: RunSnapshot, report: run_progress.Report | None) -> StatusChange:
    """Return the counters of the failure policy, which new steps reset."""
    if run.spec is None:
        return NO_CHANGE
    reached = run_progress.progress_after(run.past, report, run.total_steps, run.now)
    budget = failure_policy.budget_of(run.past, reached, run.spec.failure_policy)
    return StatusChange(restarts_counted_towards_max=budget.counted, restarts_without_step=budget.without_step)


def standing_conditions(run: RunSnapshot, *, pending: bool) -> dict[str, ConditionUpdate]:
    """Return the conditions of a continuing run that do not depend on its attempt; `pending`: see `configuration_condition`."""
    updates = {reasons.CONFIGURATION_VALID: configuration_condition(run, pending=pending)}
    if run.host_available is not None:
        updates[reasons.HOST_AVAILABLE] = run.host_available
    return updates | not_failed(run.past.conditions)


def configuration_condition(run: RunSnapshot, *, pending: bool) -> ConditionUpdate:
    """Return ConfigurationValid. `pending`: an attempt of an earlier specification may be running."""
    if run.spec is None:
        still = f"; attempt {run.past.attempt} continues with the specification of its start" if pending else ""
        return ConditionUpdate("False", reasons.INVALID_CONFIGURATION, run.problems + still)
    if run.forbidden_fields:
        still = f"; attempt {run.past.attempt} continues, and no other attempt starts" if pending else ""
        return ConditionUpdate("False", reasons.FORBIDDEN, run.forbidden_fields + still)
    if run.host is not None and (problem := host_run.storage_problem(run.spec, run.host)) is not None:
        return ConditionUpdate("False", reasons.INVALID_CONFIGURATION, problem)
    if pending and run.past.spec_hash is not None and run.spec_hash != run.past.spec_hash:
        what = "the specification was edited" if _edited_by_hand(run) else "the defaults of the namespace were edited"
        return ConditionUpdate(
            "True", reasons.CHANGE_PENDING, f"{what}; the change takes effect when the next attempt starts"
        )
    if message := _ignored_fields(run):
        return ConditionUpdate("True", reasons.FIELDS_IGNORED, message)
    return ConditionUpdate("True", reasons.VALID, "the specification can be run")


def _edited_by_hand(run: RunSnapshot) -> bool:
    """Return False if only the namespace's defaults differ from those of the attempt, as far as known."""
    defaults, began = run.observed.defaults, run.past.defaults
    return (defaults.mark if defaults is not None else None) == (began.mark if began is not None else None)


def _ignored_fields(run: RunSnapshot) -> str:
    """Return the fields of a valid specification that have no effect."""
    if run.judgement.ignored:
        return f"ignored, because this operator does not know them: {run.judgement.ignored}; upgrade the operator"
    return ignored_field(run.settings.provider, run.spec) if run.spec is not None else ""


def engine_report(run: RunSnapshot, attempt: int) -> dict[str, ConditionUpdate]:
    """Return the report on storage and engines while no attempt runs: engines stay during a restart."""
    kinds = (reasons.STORAGE_READY, reasons.INFERENCE_AVAILABLE)
    return diagnose.scene_conditions(_read_scene(run, attempt, None), _Waits(run).patient, kinds)


def storage_at_rest(run: RunSnapshot) -> dict[str, ConditionUpdate]:
    """Return the report on the volume while the run has no pod: an earlier reason to wait may be obsolete."""
    if find_condition(run.past.conditions, reasons.STORAGE_READY) is None:
        return {}
    return {reasons.STORAGE_READY: claim_messages.storage_condition(_read_scene(run, run.attempt, None), patient=True)}


def storage_status(run: RunSnapshot) -> StorageStatus | None:
    """Return the status of the run's volume."""
    if run.spec is None or (run.host_name is not None and run.host is None):
        return run.past.storage
    bound = ((run.claim or {}).get("status") or {}).get("phase") in ("Bound", "Lost")
    volume = ((run.claim or {}).get("spec") or {}).get("volumeName") if bound else None
    folder = run.context(run.spec, run.past.attempt).folder
    return StorageStatus(claim_name=run.wanted.claim, path=folder, volume_name=volume)


class _Waits:
    """Seconds for which each condition has not been true, within this attempt."""

    KINDS = (reasons.STORAGE_READY, reasons.SCHEDULED, reasons.PODS_READY, reasons.INFERENCE_AVAILABLE)

    def __init__(self, run: RunSnapshot) -> None:
        self._run = run
        # Before an attempt is recorded, events are present only if its objects are refused: a healthy start requests no events.
        kept_out = true_since(run.past.conditions, reasons.RESTARTING, true=True) if run.observed.events else None
        began = attempt_started_at(run.past.conditions)
        self._started_at = kept_out if began is None else began

    def waited_seconds(self, kind: str) -> float:
        # A condition may be older than the attempt. Only the time within the attempt counts.
        waiting = true_since(self._run.past.conditions, kind, true=False)
        if waiting is None or self._started_at is None:
            return 0.0
        return self._run.now - max(waiting, self._started_at)

    def patient(self, kind: str) -> bool:
        return 0.0 <= self.waited_seconds(kind) <= PATIENCE_SECONDS  # below 0: the clock was set back

    def explain_in(self, kind: str) -> float:
        """Seconds until the next pass: a tenth of the wait so far, within bounds."""
        least, most = EXPLAIN_SECONDS
        return min(most, max(least, self.waited_seconds(kind) / 10))

    def pending_kinds(self, updates: Mapping[str, ConditionUpdate]) -> list[str]:
        return [kind for kind in self.KINDS if kind in updates and updates[kind].status != "True"]


def _read_scene(run: RunSnapshot, attempt: int, report: run_progress.Report | None) -> Scene:
    return Scene(
        names=run.names,
        wanted=run.wanted,
        pods=run.pods_of_attempt(attempt),
        claim=run.claim,
        events=run.observed.events,
        nodes=run.observed.nodes,
        waiting_on=report.waiting_on if report is not None else None,
        trouble=claims.storage_condition(report, run.wanted.claim),
        engines_refused=is_refused(run.deployment),
        without=interruptible_engines.describe_missing_engines(run),
        namespace=str(run.metadata.get("namespace", "")),
        template=run.spec.storage.template if run.spec is not None else None,
        born=seconds_of(run.metadata.get("creationTimestamp")),
        tracker_secrets=_tracker_secrets(run.spec),
    )


def _tracker_secrets(spec: RLRunSpec | None) -> dict[str, str]:
    """See `Scene.tracker_secrets`."""
    tracking = spec.tracking if spec is not None else None
    return {secret.reference.name: secret.field for secret in (tracking.secrets if tracking is not None else ())}


def _progress_condition(run: RunSnapshot, report: run_progress.Report | None, waits: _Waits) -> ConditionUpdate:
    silent = run_progress.silent_for(stall.silent_since(run, report), run.now)
    if silent >= run_progress.HEARTBEAT_SECONDS:
        return ConditionUpdate("Unknown", reasons.HEARTBEAT_LOST, _heartbeat_lost(run, never=report is None))
    if run_progress.is_training(report):
        return ConditionUpdate(
            "True", reasons.TRAINING if run.is_training_run else reasons.ANSWERING, run.progress_texts.going
        )
    waiting = report.waiting_on if report is not None else None
    first = run.progress_texts.first
    message = f"the {first} waits for {waiting}" if waiting else f"the attempt's {first} {run.progress_texts.lacks}"
    return ConditionUpdate("Unknown", reasons.WAITING_FOR_FIRST_STEP, message)


def _heartbeat_lost(run: RunSnapshot, *, never: bool) -> str:
    network, names = run.settings.network, run.names
    what = "in this attempt" if never else f"for {run_progress.HEARTBEAT_SECONDS:g} s"
    message = f"Lease {names.progress} has not been renewed {what}; the run continues, and its progress is unknown"
    pod = f"{names.orchestrator(run.past.attempt)} -n {run.metadata['namespace']}"
    fix = f"kubectl logs {pod} shows the reason; RoleBinding {names.account} permits the renewal"
    if run.spec is None or run.spec.network_policy.mode == "None":
        return f"{message}; {fix}; no NetworkPolicy of the run blocks it"
    policy = f"NetworkPolicy {names.orchestrator_access} opens {network.api_server_text} to it"
    return f"{message}; {fix}, and {policy}: if the API server is elsewhere, set networkPolicy.apiServer in the chart's values"


def _report_checkpoints(run: RunSnapshot, report: run_progress.Report | None) -> dict[str, ConditionUpdate]:
    if run.spec is None or not run.is_training_run:
        return {}
    kind, spec = reasons.CHECKPOINT_HEALTHY, run.spec.checkpoint
    if not spec.enabled:
        return {
            kind: ConditionUpdate(
                "Unknown", reasons.CHECKPOINTS_OFF, "checkpoint.enabled is false: a restart starts from the model"
            )
        }
    if report is None or report.step is None:
        return {}
    if (refused := claims.checkpoint_condition(report)) is not None:
        return {kind: refused}
    # A checkpoint that could not be used is reported until this attempt has completed its own.
    if (lost := _lost_checkpoints(run, run.spec, report)) is not None:
        return {kind: lost}
    newest = report.checkpoint_step
    if report.step - (newest or 0) > OVERDUE_INTERVALS * spec.interval:
        what = f"the newest complete checkpoint is of step {newest}" if newest else "no checkpoint is complete"
        message = f"{what}, although checkpoint.interval is {spec.interval}; look at the log of the trainer's first pod"
        return {kind: ConditionUpdate("False", reasons.CHECKPOINTS_OVERDUE, message)}
    if newest is None:
        return {
            kind: ConditionUpdate("Unknown", reasons.NO_CHECKPOINT_YET, f"the first one is due at step {spec.interval}")
        }
    return {kind: ConditionUpdate("True", reasons.CHECKPOINTS_COMPLETE, f"one every {spec.interval} steps")}


def _lost_checkpoints(run: RunSnapshot, spec: RLRunSpec, report: run_progress.Report) -> ConditionUpdate | None:
    """Return CheckpointHealthy if the attempt could not use the newest complete checkpoint and has not completed its own yet."""
    resumed, known = report.resumed_from_step or 0, run.past.checkpoint
    if (report.checkpoint_step or 0) > resumed:
        return None
    told = find_condition(run.past.conditions, reasons.CHECKPOINT_HEALTHY)
    if known.resumed_from_step is not None:  # reported with the first report of the attempt
        return (
            None
            if told is None or told.reason != reasons.CHECKPOINTS_LOST
            else ConditionUpdate(told.status, told.reason, told.message)
        )
    newest = known.latest_complete_step or 0
    if newest <= resumed or spec.checkpoint.resume.policy == "Step":
        return None
    begin = f"step {resumed}" if resumed else "the model"
    message = (
        f"attempt {run.past.attempt} started from {begin}, although the checkpoint of step {newest} was complete: it is damaged "
        "or missing; the log of the trainer's first pod names its file; suspend the run to restore it from a copy"
    )
    return ConditionUpdate("False", reasons.CHECKPOINTS_LOST, message)


def _until_silent(run: RunSnapshot, report: run_progress.Report | None) -> float | None:
    quiet = stall.silent_since(run, report)
    if quiet is None:
        return None
    left = run_progress.HEARTBEAT_SECONDS - run_progress.silent_for(quiet, run.now)
    return left if left > 0 else None


def _until_on_record(run: RunSnapshot, ready: ConditionUpdate) -> float | None:
    """Wake up soon after PodsReady is recorded, which starts clocks: no event reports the operator's own writes of the status."""
    return SOON_SECONDS if is_true(run.past.conditions, reasons.PODS_READY) != (ready.status == "True") else None


def _report_name_conflict(run: RunSnapshot) -> ConditionUpdate | None:
    """Return Progressing of an attempt that lacks an object because a foreign object has its name."""
    if run.taken is None:
        return None
    fix = "the attempt continues without it as far as possible; delete or rename that object"
    return ConditionUpdate(
        "Unknown", reasons.NAME_TAKEN, f"{run.taken} exists and is not of this run, which needs the name; {fix}"
    )


def _report_lost_lease(run: RunSnapshot) -> ConditionUpdate | None:
    """Return Progressing of an attempt whose Lease was deleted and cannot be created again."""
    if run.observed.lease is not None:
        return None
    name, unseen = run.names.progress, "the run continues, and its progress is unknown"
    if run.spec is None:
        waits = f"Lease {name} was deleted, and is created again when the specification is valid"
        return ConditionUpdate("Unknown", reasons.INVALID_CONFIGURATION, f"{waits}; {unseen}")
    refused = diagnose.not_made_again(run.observed.events, "Lease", name)
    return None if refused is None else ConditionUpdate("Unknown", refused.reason, f"{refused.message}; {unseen}")
