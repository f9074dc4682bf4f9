"""End of a run: its GPUs are freed after all work, and the cleanup policy decides which objects stay."""

from __future__ import annotations

from rlrun_operator.decide import lifetime, status_builder
from rlrun_operator.decide.attempt_end import ends_run, record_end, run_over, status_before_attempt
from rlrun_operator.decide.cause import cause_of
from rlrun_operator.decide.objects import parts
from rlrun_operator.decide.objects.corrections import restore_engines_for_guests
from rlrun_operator.decide.reading.children import is_ending, uid_of
from rlrun_operator.decide.restart import shorten_grace
from rlrun_operator.decide.running import configuration_condition, engine_report
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.state import Actions, Decision, Delete
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import ConditionUpdate, find_condition, true_since
from rlrun_operator.times import rfc3339


def is_complete(run: RunSnapshot) -> bool:
    """Return whether the orchestrator has reported that all work is finished. That is final, even if a trainer fails during its exit."""
    completing = find_condition(run.past.conditions, reasons.COMPLETE)
    if completing is not None and completing.reason in reasons.ENDING:
        return True
    pod = run.orchestrator(run.attempt)
    return pod is not None and (pod.phase == "Succeeded" or pod.exited_cleanly)


def complete_run(run: RunSnapshot) -> Decision:
    """Free the GPUs, then report Complete; the orchestrator's pod stays for its log."""
    completing = find_condition(run.past.conditions, reasons.COMPLETE)
    freeing_began = completing is not None and completing.reason == reasons.COMPLETING
    if run.joined_guests and not freeing_began and (decision := _stay_for_guests(run)) is not None:
        return decision
    left = [pod for pod in run.pods if pod.role != "orchestrator"]
    keeps = lifetime.effective_cleanup(run) == "None"
    over = keeps or (run.statefulset is None and not run.engine_deployments and not left)
    done = ConditionUpdate("True", reasons.COMPLETED, run.words.over)
    freeing = ConditionUpdate(
        "False", reasons.COMPLETING, f"{run.words.over}; {_describe_held_gpus(run)} being removed"
    )
    updates = _completed_conditions(run, done if over else freeing, run.words.over)
    change = _trained_status(run, over=over and not keeps)
    change |= StatusChange(completion_time=rfc3339(run.now) if over else None)
    # What the end leaves, the next pass sees to: no event may come.
    delete = () if keeps else (*_list_deletions(run), *shorten_grace(run))
    return finish_decision(run, updates, change, Actions(writes=delete, wake_in=0.0 if over else None), training=True)


def _completed_conditions(run: RunSnapshot, update: ConditionUpdate, message: str) -> dict[str, ConditionUpdate]:
    """Return the conditions of a run that has trained all steps; `update` is the condition Complete."""
    return {
        reasons.COMPLETE: update,
        reasons.RESTARTING: ConditionUpdate("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration_condition(run, pending=True),
        **run_over(run, message),
    }


def _trained_status(run: RunSnapshot, *, over: bool) -> StatusChange:
    """Return the status of a run that has trained all steps; `over`: no pod is desired any more."""
    report = progress.read_lease(run.observed.lease, run.attempt)
    reached = progress.progress_after(run.past, report, run.total_steps, run.now)
    return status_builder.role_status(run, run.attempt, report, over=over) | StatusChange(
        attempt=run.attempt,
        next_retry_time=None,
        progress=progress.change_progress(reached, waiting_on=None, estimated_completion_time=None),
        checkpoint=progress.checkpoint_after(status_before_attempt(run), report, run.now),
    )


def _describe_held_gpus(run: RunSnapshot) -> str:
    """Return the parts that still hold GPUs, as the subject and verb of a sentence."""
    if not run.trains:
        return "the engines are"
    return "the trainer and the engines are" if run.serves else "the trainer is"


def _stay_for_guests(run: RunSnapshot) -> Decision | None:
    """Keep trainer and engines for the guests after the run has trained its own steps; None if they cannot be kept."""
    cause = cause_of(run, true_since(run.past.conditions, reasons.COMPLETE, true=False))
    if cause is not None and cause.role != "orchestrator" and run.spec is not None:
        return record_end(run, cause) if not ends_run(run, cause, run.spec) else None
    guests = ", ".join(run.joined_guests)
    message = f"all steps are trained; trainer and engines stay for the runs that share them: {guests}"
    ends = "they go when these are over; deleting them frees the GPUs now"
    update = ConditionUpdate("False", reasons.GUESTS_JOINED, f"{message}; {ends}")
    updates = _completed_conditions(run, update, "all steps are trained") | engine_report(run, run.attempt)
    scale, apply = restore_engines_for_guests(run)
    beside = parts.compare_parts(run, run.attempt)
    actions = Actions(writes=(*apply, *scale, *beside.repair), wake_in=beside.wake_in)
    return finish_decision(run, {**updates, **beside.updates}, _trained_status(run, over=False), actions, training=True)


def clean_ended_run(run: RunSnapshot) -> Decision:
    """Keep the terminal state, and delete the objects that `cleanupPolicy` does not keep. Training pods get time to save."""
    policy = lifetime.effective_cleanup(run)
    orphans = [p for p in run.group if p.works and (p.role == "orchestrator" or run.statefulset is None)]
    if policy == "All":
        orphans = [p for p in run.group if p.deleted_at is None and (p in orphans or p.role == "orchestrator")]
    ends = [*_list_deletions(run), *(Delete(pod.ref, pod.uid) for pod in orphans), *shorten_grace(run)]
    delete = [] if policy == "None" else ends
    report = progress.read_lease(run.observed.lease, run.past.attempt)
    change = StatusChange(checkpoint=progress.checkpoint_after(run.past, report, run.now))
    roles = status_builder.role_status(run, run.past.attempt, report, over=policy != "None")
    return finish_decision(run, {}, roles | change, Actions(writes=delete))


def _list_deletions(run: RunSnapshot) -> list[Delete]:
    trainer = [(run.trainer_ref, run.statefulset)] if run.statefulset is not None else []
    return [Delete(ref, uid_of(child)) for ref, child in (*trainer, *run.engine_deployments) if not is_ending(child)]
