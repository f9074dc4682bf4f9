"""End of a run: the cause that ends its current attempt, its completion, and its cleanup.

`cause_of` checks the possible causes in order, and the attempt ends for the first one that applies. A run that has finished all work first
frees its GPUs and then reports Complete. After that, its cleanup policy determines which objects stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlrun_operator.decide import api_keys, claims, host_run, lifetime, repairs, status_builder
from rlrun_operator.decide.attempt_end import ends_run, record_end, run_over, status_before_attempt
from rlrun_operator.decide.reading import desired_replicas, is_ending, uid_of
from rlrun_operator.decide.repairs import restore_engines_for_guests
from rlrun_operator.decide.restart import shorten_grace
from rlrun_operator.decide.running import configuration_condition, engine_report
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.failures import detect, node_failures
from rlrun_operator.failures.detect import Cause
from rlrun_operator.pods import Pod
from rlrun_operator.state import Actions, Decision, Delete
from rlrun_operator.status import reasons, run_progress
from rlrun_operator.status.conditions import ConditionUpdate, StatusChange, find_condition, true_since
from rlrun_operator.times import format_rfc3339


def cause_of(run: RunSnapshot, settled_at: float | None) -> Cause | None:
    """Return the cause that ends the current attempt, or None.

    A guest uses the trainer of its host, another run. The attempt of a guest ends with that of its host; such an end does not count towards
    `maxRestarts`.
    """
    attempt = run.past.attempt
    guest = run.host_name is not None
    # The end of the host comes first: the failures of the guest's own pods follow from it, and must not
    # count towards `maxRestarts`.
    lost = host_run.explain_lost_host(run.observed.run, run.observed.host, run.host_mark(attempt)) if guest else None
    if lost is not None:
        return lost
    cause = detect.first_cause(
        _without_surplus(run, run.pods),
        _without_surplus(run, run.gone),
        attempt,
        run.names,
        trainers=min(run.wanted.trainers, desired_replicas(run.statefulset)),
        has_statefulset=guest
        or not run.is_training_run
        or (run.statefulset is not None and not is_ending(run.statefulset)),
        settled_at=settled_at,
        now=run.now,
    )
    # A guest's orchestrator fails without its trainer. Until the trainer is ready again, this is not a
    # failure of the guest.
    if guest and cause is not None and cause.kind == "failure" and not host_run.trainer_ready(run.observed.host):
        return replace(cause, kind="disruption")
    return (
        cause
        or claims.ending_claim_cause(run)
        or repairs.missing_configuration_cause(run)
        or api_keys.missing_key_cause(run)
        or node_failures.lift_exclusions(run.pods_of_attempt(attempt), run.past, run.now)
    )


def _without_surplus(run: RunSnapshot, pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods that may end an attempt.

    Spot engines that the run does not need are excluded, and trainer pods with an ordinal beyond the wanted number: a StatefulSet adopts
    foreign pods with its labels, and deletes them.
    """
    # While the number of trainer pods changes, pods of the old and of the new number may fail: use the larger number.
    most = max(run.wanted.trainers, desired_replicas(run.statefulset))

    def is_wanted(pod: Pod) -> bool:
        return pod.role != "trainer" or run.host_name is not None or int(pod.name.rpartition("-")[2]) < most

    return [pod for pod in pods if run.is_needed(pod) and is_wanted(pod)]


def settled_at(run: RunSnapshot) -> float | None:
    """Return the time at which all pods of the attempt were ready, in seconds since the epoch, or None if no condition shows it.

    This is the earlier of two times: PodsReady became True, and Reconciling became False, which means that the run trains steps.
    """
    times = [
        true_since(run.past.conditions, reasons.PODS_READY, true=True),
        true_since(run.past.conditions, reasons.RECONCILING, true=False),
    ]
    return min((t for t in times if t is not None), default=None)


def is_complete(run: RunSnapshot) -> bool:
    """Return whether the orchestrator has reported that all work is finished. Its report is final, even if a trainer
    fails during its exit."""
    completing = find_condition(run.past.conditions, reasons.COMPLETE)
    if completing is not None and completing.reason in reasons.ENDING:
        return True
    pod = run.orchestrator(run.attempt)
    return pod is not None and (pod.phase == "Succeeded" or pod.exited_cleanly)


def complete_run(run: RunSnapshot) -> Decision:
    """Free the GPUs, then report Complete; the orchestrator's pod stays for its log."""
    completing = find_condition(run.past.conditions, reasons.COMPLETE)
    freeing_began = completing is not None and completing.reason == reasons.COMPLETING
    # Keep trainer and engines for the guests. Do not undo a removal that has started: the pods are already
    # terminating.
    if run.joined_guests and not freeing_began and (decision := _stay_for_guests(run)) is not None:
        return decision
    # The orchestrator's pod does not delay the end: it has no GPU, and it stays for its log.
    left = [pod for pod in run.pods if pod.role != "orchestrator"]
    # The cleanup policy None keeps all objects: the run is Complete at once, and its pods stay desired.
    keeps = lifetime.effective_cleanup(run) == "None"
    over = keeps or (run.statefulset is None and not run.engine_deployments and not left)
    done = ConditionUpdate("True", reasons.COMPLETED, run.progress_texts.over)
    freeing = ConditionUpdate(
        "False", reasons.COMPLETING, f"{run.progress_texts.over}; {_describe_held_gpus(run)} being removed"
    )
    updates = _completed_conditions(run, done if over else freeing, run.progress_texts.over)
    change = _trained_status(run, over=over and not keeps)
    change |= StatusChange(completion_time=format_rfc3339(run.now) if over else None)
    # After the end, the next pass deletes objects by `cleanupPolicy`. `wake_in=0` requests that pass, because possibly no event starts it.
    delete = () if keeps else (*_list_deletions(run), *shorten_grace(run))
    return finish_decision(run, updates, change, Actions(writes=delete, wake_in=0.0 if over else None), training=True)


def _completed_conditions(run: RunSnapshot, update: ConditionUpdate, message: str) -> dict[str, ConditionUpdate]:
    """Return the conditions of a run that has finished all work: `update` for Complete, and `message` for the conditions that end."""
    return {
        reasons.COMPLETE: update,
        reasons.RESTARTING: ConditionUpdate("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration_condition(run, pending=True),
        **run_over(run, message),
    }


def _trained_status(run: RunSnapshot, *, over: bool) -> StatusChange:
    """Return the status of a run that has finished all work; `over`: no pod is desired any more."""
    report = run_progress.read_lease(run.observed.lease, run.attempt)
    reached = run_progress.progress_after(run.past, report, run.total_steps, run.now)
    # If the start of this attempt is not recorded yet, the recorded step from which the previous one resumed does not apply.
    return status_builder.role_status(run, run.attempt, report, over=over) | StatusChange(
        attempt=run.attempt,
        next_retry_time=None,
        progress=run_progress.change_progress(reached, waiting_on=None, estimated_completion_time=None),
        checkpoint=run_progress.checkpoint_after(status_before_attempt(run), report, run.now),
    )


def _describe_held_gpus(run: RunSnapshot) -> str:
    """Return the parts that still hold GPUs, as the subject and verb of a sentence."""
    if not run.is_training_run:
        return "the engines are"
    return "the trainer and the engines are" if run.has_own_engines else "the trainer is"


def _stay_for_guests(run: RunSnapshot) -> Decision | None:
    """Keep trainer and engines for the guests after the run has trained its own steps; None if a failure of them would fail the run."""
    # The run itself has finished, so a failed trainer restarts only for the guests. A failure that would fail the run ends it as Complete
    # instead. The time since which Complete is False replaces `settled_at`: PodsReady is False after the last step.
    cause = cause_of(run, true_since(run.past.conditions, reasons.COMPLETE, true=False))
    if cause is not None and cause.role != "orchestrator" and run.spec is not None:
        return record_end(run, cause) if not ends_run(run, cause, run.spec) else None
    guests = ", ".join(run.joined_guests)
    message = f"all steps are trained; trainer and engines stay for the runs that share them: {guests}"
    ends = "they go when these are over; deleting them frees the GPUs now"
    update = ConditionUpdate("False", reasons.GUESTS_JOINED, f"{message}; {ends}")
    updates = _completed_conditions(run, update, "all steps are trained") | engine_report(run, run.attempt)
    scale, apply = restore_engines_for_guests(run)
    beside = repairs.compare_parts(run, run.attempt)
    actions = Actions(writes=(*apply, *scale, *beside.repair), wake_in=beside.wake_in)
    return finish_decision(run, {**updates, **beside.updates}, _trained_status(run, over=False), actions, training=True)


def clean_ended_run(run: RunSnapshot) -> Decision:
    """Keep the terminal state, and delete the objects that `cleanupPolicy` does not keep. Training pods get time to save."""
    policy = lifetime.effective_cleanup(run)
    # The StatefulSet deletes its own pods. Pods without a controller are deleted one by one, and get their
    # grace period to save.
    orphans = [p for p in run.group if p.keeps_running and (p.role == "orchestrator" or run.statefulset is None)]
    # The policy All also deletes a finished orchestrator pod, which otherwise stays for its log.
    if policy == "All":
        orphans = [p for p in run.group if p.deleted_at is None and (p in orphans or p.role == "orchestrator")]
    ends = [*_list_deletions(run), *(Delete(pod.ref, pod.uid) for pod in orphans), *shorten_grace(run)]
    delete = [] if policy == "None" else ends
    report = run_progress.read_lease(run.observed.lease, run.past.attempt)
    change = StatusChange(checkpoint=run_progress.checkpoint_after(run.past, report, run.now))
    roles = status_builder.role_status(run, run.past.attempt, report, over=policy != "None")
    return finish_decision(run, {}, roles | change, Actions(writes=delete))


def _list_deletions(run: RunSnapshot) -> list[Delete]:
    trainer = [(run.trainer_ref, run.statefulset)] if run.statefulset is not None else []
    return [Delete(ref, uid_of(child)) for ref, child in (*trainer, *run.engine_deployments) if not is_ending(child)]
