"""Supervision of an attempt whose workloads exist: its report, and when it is looked at again."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.api.resource import RLRunSpec
from rlrun.api.status import StorageStatus
from rlrun_operator.decide import host_run, stall, status_builder
from rlrun_operator.decide.engines import scaling, spot
from rlrun_operator.decide.objects import corrections, parts, unstarted, volumes
from rlrun_operator.decide.reading.children import is_refused
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.status_builder import finish
from rlrun_operator.decide.trainers import look
from rlrun_operator.failures import node_exclusion, policy
from rlrun_operator.state import NO_ACTIONS, SOON_SECONDS, Actions, Decision
from rlrun_operator.status import claims, diagnose, progress, reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange, combined
from rlrun_operator.status.conditions import Say, begun, find, is_true, not_failed, since
from rlrun_operator.status.scene import Scene
from rlrun_operator.times import seconds_of

PATIENCE_SECONDS = 2.0
"""A healthy start passes every stage faster than an explanation would help; before that nothing is called a problem."""
EXPLAIN_SECONDS = (5.0, 60.0)
"""Time between two explanations of a wait: at first, and when it has lasted long. Events and nodes are not watched."""
TAKEN_SECONDS = 10.0
"""Time between two looks whether a foreign object still has a child's name."""
OVERDUE_INTERVALS = 3
"""A newest complete checkpoint older than this many intervals is overdue."""


def follow(case: Case, attempt: int, change: StatusChange = NO_CHANGE, actions: Actions = NO_ACTIONS) -> Decision:
    """Report the state of `attempt`, and keep the number of engines at the specified one.

    Args:
        case: what is decided about.
        attempt: the current one, or the one that begins now.
        change: more fields of the status.
        actions: what beginning the attempt takes.
    """
    begins = case.past.attempt != attempt
    heard = stall.hear(case, attempt)
    scene, waits = _scene(case, attempt, heard), _Waits(case)
    said = _conditions(case, scene, heard, waits, begins=begins)
    engine_marks, engine_scales = ([], []) if begins else scaling.scaled(case, heard)
    spot_engines = spot.applies(case, attempt, begins=begins)
    beside = parts.Seen({reasons.CHILDREN_INTACT: None}) if begins else parts.see(case, attempt)
    again = _look_again(case, scene, heard, waits, said)
    wakes = [actions.wake_in, again.wake_in, beside.wake_in]
    corrected = corrections.corrected(case, attempt, begins, bool(actions.apply))
    todo = Actions(
        create=(*actions.create, *corrections.lost_claim(case, attempt)),
        apply=(*actions.apply, *corrected, *spot_engines),
        dry_run=actions.dry_run,
        annotate=() if begins else (*scaling.asked(case, heard), *engine_marks),
        scale=() if begins else (*engine_scales, *corrections.scales(case)),
        delete=(*corrections.zombies(case, attempt), *spot.removals(case)),
        repair=(*corrections.lost_lease(case, attempt), *beside.repair),
        wake_in=min((w for w in wakes if w is not None), default=None),
        look_up=again.look_up,
    )
    fields = _reached(case, attempt, heard)
    fields |= combined(scaling.chosen(case, heard, fields), look.noted(case, heard, fields))
    fields |= combined(spot.noted(case, fields, renewed=bool(spot_engines)), unstarted.noted(case, attempt), change)
    of_parts = beside.said | parts.outdated(case, corrected)
    return finish(case, {**said, **of_parts}, fields, todo, training=progress.is_training(heard))


def _conditions(
    case: Case, scene: Scene, heard: progress.Report | None, waits: _Waits, *, begins: bool
) -> dict[str, Say]:
    """Conditions of an attempt that exists; `begins`: in this very pass."""
    said = _of_pods(scene, waits)
    said[reasons.SCHEDULED] = node_exclusion.noted(said[reasons.SCHEDULED], case.past, case.now)
    said[reasons.PROGRESSING] = (
        _unmade(case) or stall.say(case, heard) or _unseen(case) or _progressing(case, heard, waits)
    )
    said[reasons.RESTARTING] = Say("False", reasons.NOT_RESTARTING, "no restart is under way")
    return said | _checkpoints(case, heard) | standing(case, pending=not begins)


def _reached(case: Case, attempt: int, heard: progress.Report | None) -> StatusChange:
    """Progress of the attempt, its roles, its storage, its excluded nodes and its failure budget."""
    measured = progress.measured(case.past, heard, case.total_steps, case.now)
    beside = StatusChange(
        storage=storage_status(case), excluded_nodes=node_exclusion.active(case.past, case.now) or None
    )
    return combined(status_builder.roles(case, attempt, heard), measured, beside, _budget(case, heard))


def _look_again(
    case: Case, scene: Scene, heard: progress.Report | None, waits: _Waits, said: Mapping[str, Say]
) -> Actions:
    """Time of the next look at an attempt, and the facts that would explain what it waits for."""
    patient = [kind for kind in waits.kinds(said) if waits.patient(kind)]
    unexplained = [kind for kind in waits.kinds(said) if kind not in patient]
    helps = bool(unexplained) and diagnose.facts_that_would_help(scene, said)
    nodes = diagnose.nodes_would_help(scene, said)
    wakes = [
        PATIENCE_SECONDS if patient else None,
        max(waits.explain_in(kind) for kind in unexplained) if helps else None,
        _until_silent(case, heard),
        _until_on_record(case, said[reasons.PODS_READY]),
        stall.wake_in(case, heard),
        TAKEN_SECONDS if case.taken is not None else None,
    ]
    return Actions(
        wake_in=min((w for w in wakes if w is not None), default=None),
        look_up=frozenset(("events", "nodes") if nodes else ("events",)) if helps else frozenset(),
    )


def _budget(case: Case, heard: progress.Report | None) -> StatusChange:
    """The failure policy's counters, which new steps set back."""
    if case.spec is None:
        return NO_CHANGE
    reached = progress.progressed(case.past, heard, case.total_steps, case.now)
    budget = policy.budget_of(case.past, reached, case.spec.failure_policy)
    return StatusChange(restarts_counted_towards_max=budget.counted, restarts_without_step=budget.without_step)


def standing(case: Case, *, pending: bool) -> dict[str, Say]:
    """Conditions of a run that goes on, whatever its attempt does; `pending`: see `configuration`."""
    said = {reasons.CONFIGURATION_VALID: configuration(case, pending=pending)}
    if case.host_available is not None:
        said[reasons.HOST_AVAILABLE] = case.host_available
    return said | not_failed(case.past.conditions)


def configuration(case: Case, *, pending: bool) -> Say:
    """ConfigurationValid. `pending`: an attempt of an earlier specification may be running."""
    if case.spec is None:
        still = f"; attempt {case.past.attempt} goes on with the specification that it began with" if pending else ""
        return Say("False", reasons.INVALID_CONFIGURATION, case.problems + still)
    if case.forbidden:
        still = f"; attempt {case.past.attempt} goes on, and no other one begins" if pending else ""
        return Say("False", reasons.FORBIDDEN, case.forbidden + still)
    if case.host is not None and (problem := host_run.storage_problem(case.spec, case.host)) is not None:
        return Say("False", reasons.INVALID_CONFIGURATION, problem)
    if pending and case.past.spec_hash is not None and case.spec_hash != case.past.spec_hash:
        what = "the specification was edited" if _edited_by_hand(case) else "the defaults of the namespace were edited"
        return Say("True", reasons.CHANGE_PENDING, f"{what}; the change takes effect when the next attempt begins")
    if message := _ignored(case):
        return Say("True", reasons.FIELDS_IGNORED, message)
    return Say("True", reasons.VALID, "the specification can be run")


def _edited_by_hand(case: Case) -> bool:
    """False if the namespace's defaults alone differ from those of the attempt, as far as that is known."""
    defaults, began = case.observed.defaults, case.past.defaults
    return (defaults.mark if defaults is not None else None) == (began.mark if began is not None else None)


def _ignored(case: Case) -> str:
    """Fields of a usable specification that are not acted on."""
    if case.judgement.ignored:
        return f"ignored, because this operator does not know them: {case.judgement.ignored}; upgrade the operator"
    spec, provider = case.spec, case.settings.provider
    if spec is not None and spec.queue_name and provider not in ("kueue", "volcano"):
        return f"ignored: queueName {spec.queue_name}, because neither Kueue nor Volcano is this operator's queue (queue.provider)"
    if spec is not None and spec.priority and provider == "volcano":
        return f"ignored: priority {spec.priority}, because Volcano ranks runs by trainer.priorityClassName alone"
    return ""


def of_inference(case: Case, attempt: int) -> dict[str, Say]:
    """Report of storage and engines while no attempt runs: engines stay through a restart."""
    scene = _scene(case, attempt, None)
    waits = _Waits(case)
    said = {reasons.STORAGE_READY: claims.storage(scene, waits.patient(reasons.STORAGE_READY))}
    return said | _of_engines(scene, waits)


def storage_at_rest(case: Case) -> dict[str, Say]:
    """Report of the volume while the run has no pod, where there was one before: why it once was waited for may be over."""
    if find(case.past.conditions, reasons.STORAGE_READY) is None:
        return {}
    return {reasons.STORAGE_READY: claims.storage(_scene(case, case.attempt, None), patient=True)}


def storage_status(case: Case) -> StorageStatus | None:
    """The run's volume."""
    if case.spec is None or (case.host_name is not None and case.host is None):
        return case.past.storage
    bound = ((case.claim or {}).get("status") or {}).get("phase") in ("Bound", "Lost")
    volume = ((case.claim or {}).get("spec") or {}).get("volumeName") if bound else None
    folder = case.context(case.spec, case.past.attempt).folder
    return StorageStatus(claim_name=case.wanted.claim, path=folder, volume_name=volume)


class _Waits:
    """Time for which each condition has not been true, within this attempt."""

    KINDS = (reasons.STORAGE_READY, reasons.SCHEDULED, reasons.PODS_READY, reasons.INFERENCE_AVAILABLE)

    def __init__(self, case: Case) -> None:
        self._case = case
        # Events are there before an attempt is on record only where it is due and not let in: nothing is asked for at a healthy start.
        kept_out = since(case.past.conditions, reasons.RESTARTING, true=True) if case.observed.events else None
        began = begun(case.past.conditions)
        self._begun = kept_out if began is None else began

    def seconds(self, kind: str) -> float:
        waiting = since(self._case.past.conditions, kind, true=False)
        if waiting is None or self._begun is None:
            return 0.0
        return self._case.now - max(waiting, self._begun)

    def patient(self, kind: str) -> bool:
        return 0.0 <= self.seconds(kind) <= PATIENCE_SECONDS  # below 0: the clock was set back

    def explain_in(self, kind: str) -> float:
        """Seconds until the next look: a tenth of the wait so far, within bounds."""
        least, most = EXPLAIN_SECONDS
        return min(most, max(least, self.seconds(kind) / 10))

    def kinds(self, said: Mapping[str, Say]) -> list[str]:
        return [kind for kind in self.KINDS if kind in said and said[kind].status != "True"]


def _scene(case: Case, attempt: int, heard: progress.Report | None) -> Scene:
    return Scene(
        names=case.names,
        wanted=case.wanted,
        pods=case.pods_of_attempt(attempt),
        claim=case.claim,
        events=case.observed.events,
        nodes=case.observed.nodes,
        waiting_on=heard.waiting_on if heard is not None else None,
        trouble=volumes.ready(heard, case.wanted.claim),
        engines_refused=is_refused(case.deployment),
        without=spot.missing(case),
        namespace=str(case.metadata.get("namespace", "")),
        template=case.spec.storage.template if case.spec is not None else None,
        born=seconds_of(case.metadata.get("creationTimestamp")),
        tracker_secrets=_tracker_secrets(case.spec),
    )


def _tracker_secrets(spec: RLRunSpec | None) -> dict[str, str]:
    """See `Scene.tracker_secrets`."""
    tracking = spec.tracking if spec is not None else None
    return {secret.reference.name: secret.field for secret in (tracking.secrets if tracking is not None else ())}


def _of_pods(scene: Scene, waits: _Waits) -> dict[str, Say]:
    return {
        reasons.STORAGE_READY: claims.storage(scene, waits.patient(reasons.STORAGE_READY)),
        reasons.SCHEDULED: diagnose.scheduled(scene, waits.patient(reasons.SCHEDULED)),
        reasons.PODS_READY: diagnose.pods_ready(scene, waits.patient(reasons.PODS_READY)),
        **_of_engines(scene, waits),
    }


def _of_engines(scene: Scene, waits: _Waits) -> dict[str, Say]:
    """InferenceAvailable, which a run without engines does not have."""
    if not scene.wanted.engines:
        return {}
    return {reasons.INFERENCE_AVAILABLE: diagnose.inference(scene, waits.patient(reasons.INFERENCE_AVAILABLE))}


def _progressing(case: Case, heard: progress.Report | None, waits: _Waits) -> Say:
    silent = progress.silent_for(stall.silent_since(case, heard), case.now)
    if silent >= progress.HEARTBEAT_SECONDS:
        return Say("Unknown", reasons.HEARTBEAT_LOST, _heartbeat_lost(case, never=heard is None))
    if progress.is_training(heard):
        return Say("True", reasons.TRAINING if case.trains else reasons.ANSWERING, case.words.going)
    waiting = heard.waiting_on if heard is not None else None
    first = case.words.first
    message = f"the {first} waits for {waiting}" if waiting else f"the attempt's {first} {case.words.lacks}"
    return Say("Unknown", reasons.WAITING_FOR_FIRST_STEP, message)


def _heartbeat_lost(case: Case, *, never: bool) -> str:
    network, names = case.settings.network, case.names
    what = "in this attempt" if never else f"for {progress.HEARTBEAT_SECONDS:g} s"
    message = f"Lease {names.progress} has not been renewed {what}; the run goes on, and its progress cannot be seen"
    pod = f"{names.orchestrator(case.past.attempt)} -n {case.metadata['namespace']}"
    fix = f"kubectl logs {pod} says why; RoleBinding {names.account} lets it"
    if case.spec is None or case.spec.network_policy.mode == "None":
        return f"{message}; {fix}; no NetworkPolicy of the run stands in its way"
    policy = f"NetworkPolicy {names.orchestrator_access} opens {network.ways} to it"
    return f"{message}; {fix}, and {policy}: if the API server is elsewhere, set networkPolicy.apiServer in the chart's values"


def _checkpoints(case: Case, heard: progress.Report | None) -> dict[str, Say]:
    if case.spec is None or not case.trains:
        return {}
    kind, spec = reasons.CHECKPOINT_HEALTHY, case.spec.checkpoint
    if not spec.enabled:
        return {
            kind: Say(
                "Unknown", reasons.CHECKPOINTS_OFF, "checkpoint.enabled is false: a restart begins from the model"
            )
        }
    if heard is None or heard.step is None:
        return {}
    if (refused := volumes.checkpoints(heard)) is not None:
        return {kind: refused}
    if (lost := _lost_checkpoints(case, case.spec, heard)) is not None:
        return {kind: lost}
    newest = heard.checkpoint_step
    if heard.step - (newest or 0) > OVERDUE_INTERVALS * spec.interval:
        what = f"the newest complete checkpoint is of step {newest}" if newest else "no checkpoint is complete"
        message = f"{what}, although checkpoint.interval is {spec.interval}; look at the log of the trainer's first pod"
        return {kind: Say("False", reasons.CHECKPOINTS_OVERDUE, message)}
    if newest is None:
        return {kind: Say("Unknown", reasons.NO_CHECKPOINT_YET, f"the first one is due at step {spec.interval}")}
    return {kind: Say("True", reasons.CHECKPOINTS_COMPLETE, f"one every {spec.interval} steps")}


def _lost_checkpoints(case: Case, spec: RLRunSpec, heard: progress.Report) -> Say | None:
    """CheckpointHealthy of an attempt that could not use the newest complete checkpoint, until it has completed one of its own."""
    resumed, known = heard.resumed_from_step or 0, case.past.checkpoint
    if (heard.checkpoint_step or 0) > resumed:
        return None
    told = find(case.past.conditions, reasons.CHECKPOINT_HEALTHY)
    if known.resumed_from_step is not None:  # told when its first report came
        return (
            None
            if told is None or told.reason != reasons.CHECKPOINTS_LOST
            else Say(told.status, told.reason, told.message)
        )
    newest = known.latest_complete_step or 0
    if newest <= resumed or spec.checkpoint.resume.policy == "Step":
        return None
    begin = f"step {resumed}" if resumed else "the model"
    message = (
        f"attempt {case.past.attempt} started from {begin}, although the checkpoint of step {newest} was complete: it is damaged "
        "or missing; the log of the trainer's first pod names its file; suspend the run to restore it from a copy"
    )
    return Say("False", reasons.CHECKPOINTS_LOST, message)


def _until_silent(case: Case, heard: progress.Report | None) -> float | None:
    quiet = stall.silent_since(case, heard)
    if quiet is None:
        return None
    left = progress.HEARTBEAT_SECONDS - progress.silent_for(quiet, case.now)
    return left if left > 0 else None


def _until_on_record(case: Case, ready: Say) -> float | None:
    """Clocks begin when PodsReady is on record, and no event reports a status that the operator itself has written."""
    return SOON_SECONDS if is_true(case.past.conditions, reasons.PODS_READY) != (ready.status == "True") else None


def _unmade(case: Case) -> Say | None:
    """Progressing of an attempt that lacks what a foreign object has the name of."""
    if case.taken is None:
        return None
    fix = "the attempt goes on as far as it can without; delete or rename that object"
    return Say(
        "Unknown", reasons.NAME_TAKEN, f"{case.taken} exists and is not of this run, which needs the name; {fix}"
    )


def _unseen(case: Case) -> Say | None:
    """Progressing of an attempt whose Lease was deleted, while no other one can be made."""
    if case.observed.lease is not None:
        return None
    name, unseen = case.names.progress, "the run goes on, and its progress cannot be seen"
    if case.spec is None:
        waits = f"Lease {name} was deleted, and is made again when the specification can be run"
        return Say("Unknown", reasons.INVALID_CONFIGURATION, f"{waits}; {unseen}")
    refused = diagnose.not_made_again(case.observed.events, "Lease", name)
    return None if refused is None else Say("Unknown", refused.reason, f"{refused.message}; {unseen}")
