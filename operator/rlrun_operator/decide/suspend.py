"""Suspension: trainer and orchestrator save and end, then the engines end; the run can resume with the next attempt.

    any ──> Suspending ──> Suspended ──> the next attempt, which does not count

The suspension is recorded (condition Suspended, reason Suspending) before pods are removed. From then on `spec.suspend` is ignored until
all pods are gone: the pods of trainer and orchestrator get SIGTERM together and complete a checkpoint of the last finished step; the
engines are removed after them. The volume and the small objects stay.
"""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator.decide import gpu_time, queueing, status_builder
from rlrun_operator.decide.attempt import launch_attempt, next_attempt
from rlrun_operator.decide.attempt_end import status_before_attempt
from rlrun_operator.decide.reading import has_let_go, is_ending, uid_of
from rlrun_operator.decide.restart import delete_pods, list_names, overdue_pods, settles_in
from rlrun_operator.decide.running import standing_conditions, storage_at_rest
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Decision, Delete
from rlrun_operator.status import reasons, run_progress
from rlrun_operator.status.conditions import ConditionUpdate, StatusChange, find_condition, is_true
from rlrun_operator.validate_spec import count_noun


def continue_suspension(run: RunSnapshot) -> Decision | None:
    """Return the next step into suspension, during it, or out of it; None if the run is not affected."""
    updates = find_condition(run.past.conditions, reasons.SUSPENDED)
    # From its record on, a suspension completes even if the request is withdrawn: pods that were asked to end
    # cannot be kept.
    under_way = updates is not None and updates.reason in reasons.SUSPENSION
    if not under_way:
        return _begin_suspension(run) if queueing.shall_rest(run) or queueing.is_evicted(run) else None
    if not queueing.shall_rest(run) and is_true(run.past.conditions, reasons.SUSPENDED):
        return _resume_run(run)
    return _remove_remaining(run)


def _begin_suspension(run: RunSnapshot) -> Decision:
    """Record the suspension. `launched_attempt` is set, so that an attempt with missing children is not completed any more."""
    return _suspending_decision(run, f"the run is about to be stopped{_suspension_reason(run)}", AT_ONCE)


def _suspension_reason(run: RunSnapshot) -> str:
    """Return the reason of a suspension without a request of the user, as the end of a sentence."""
    if queueing.is_suspended_by_user(run):
        return ""
    if gpu_time.is_spent(run):
        return f": {gpu_time.spent_message(run)}"
    return f": {queueing.admission_message(run)}" if run.observed.admission is not None else ""


def _remove_remaining(run: RunSnapshot) -> Decision:
    """Remove the remaining objects in order; the run is Suspended when no pod is left."""
    # Three stages, each after the end of the one before: trainer and orchestrator, which save; the engines;
    # the time in which the cache may still miss a pod.
    scale, delete = delete_pods(run)
    names = sorted(pod.name for pod in run.group)
    stuck = overdue_pods(run, suspending=True)
    ends = Actions(wake_in=stuck.look_in, look_up=frozenset(("nodes",)) if stuck.nodes_would_help else frozenset())
    if names or not has_let_go(run.statefulset):
        what = f"{_name_roles(run)} save and end{f': {stuck.told}' if stuck.told else list_names(names)}"
        return _suspending_decision(run, what, replace(ends, writes=[*scale, *delete, *stuck.force]))
    engines = [Delete(ref, uid_of(child)) for ref, child in run.engine_deployments if not is_ending(child)]
    if engines:
        return _suspending_decision(
            run, f"{_name_roles(run)} are gone; the engines are removed", Actions(writes=engines)
        )
    if run.pods or run.engine_deployments:
        left = f": {stuck.told}" if stuck.told else list_names(sorted(pod.name for pod in run.pods))
        return _suspending_decision(run, f"the engines end{left}", replace(ends, writes=stuck.force))
    if (settles := settles_in(run, reasons.SUSPENDED)) > 0:
        return _suspending_decision(run, "no pod is seen any more", Actions(wake_in=settles))
    return _rest_suspended(run)


def _name_roles(run: RunSnapshot) -> str:
    return "trainer and orchestrator" if run.is_training_run else "the orchestrator's pods"


def _rest_suspended(run: RunSnapshot, waits_for: str = "") -> Decision:
    """Report a suspended run without pods. `waits_for`: reason why it cannot resume yet."""
    if waits_for:
        return _suspension_decision(
            run, ConditionUpdate("True", reasons.SUSPENDED, f"the run stays suspended: {waits_for}"), over=True
        )
    message = f"no pod is left; {where_it_goes_on(run)}, {_awaited_condition(run)}"
    actions = NO_ACTIONS if queueing.shall_rest(run) else AT_ONCE
    if queueing.is_evicted(run):
        actions = Actions(wake_in=queueing.LOOK_SECONDS)  # usually the next plan of the queue starts a pass earlier
    return _suspension_decision(run, ConditionUpdate("True", reasons.SUSPENDED, message), actions, over=True)


def _awaited_condition(run: RunSnapshot) -> str:
    """Return the condition that ends the suspension, as the end of a sentence."""
    waits = ["spec.suspend is false"] if queueing.is_suspended_by_user(run) else []
    if gpu_time.is_spent(run):
        waits.append(f"budget.gpuHours is more than the {gpu_time.gpu_hours(run):g} that are spent")
    answer = run.observed.admission
    if not waits and answer is not None and not answer.admitted:
        waits.append("the queue has room for it")
    return f"when {' and '.join(waits)}" if waits else "at once"


def _resume_run(run: RunSnapshot) -> Decision:
    """Start the next attempt, or adopt one whose children were created before its start was recorded."""
    # A crash between the children and the status leaves children of an attempt that is not recorded. That
    # attempt is adopted, not started a second time.
    is_begun = run.attempt > run.past.attempt
    if any(pod.attempt <= run.past.attempt for pod in run.group) or not (is_begun or has_let_go(run.statefulset)):
        return _remove_remaining(run)  # late pods of an older attempt
    if queueing.is_evicted(run):
        return _remove_remaining(run)  # the queue has evicted the run during its start
    host = run.host_available
    # A suspended run does not fail because of its specification: the user may be correcting it. Children that
    # exist already are removed again.
    if run.spec is None:
        fix = "set spec.suspend to true, correct it, and set it to false"
        return (
            _remove_remaining(run)
            if is_begun
            else _rest_suspended(run, f"its specification is invalid: {run.problems}; {fix}")
        )
    if run.forbidden_fields:
        fix = "correct it while spec.suspend is true, and resume it"
        return _remove_remaining(run) if is_begun else _rest_suspended(run, f"{run.forbidden_fields}; {fix}")
    if not is_begun and host is not None and host.status != "True":
        return _rest_suspended(run, host.message)  # a wait between two attempts would hold a slot of the host
    if (queued := queueing.pending_admission_condition(run)) is not None:
        if is_begun:
            return _remove_remaining(run)  # created before the eviction, and observed only now
        actions = AT_ONCE if queued.status == "True" else Actions(wake_in=queueing.LOOK_SECONDS)
        return _suspension_decision(
            run, ConditionUpdate("True", reasons.SUSPENDED, f"no pod is left; {queued.message}"), actions, over=True
        )
    return launch_attempt(run, run.spec, run.attempt if is_begun else (next_attempt(run) if run.attempt else 1))


def where_it_goes_on(run: RunSnapshot) -> str:
    """Return the step from which the next attempt continues, as far as the orchestrator has reported."""
    done, saved = run.past.progress.step, run.past.checkpoint.latest_complete_step
    if not run.past.attempt:
        return "its first attempt starts"
    if not run.is_training_run:
        return f"it requests the missing answers ({run.past.steps})"
    if not saved:
        return (
            f"it starts again from the model ({count_noun(done, 'step')} lost)" if done else "it starts from the model"
        )
    lost = f"; {count_noun(done - saved, 'step')} trained after it are trained again" if done > saved else ""
    return f"it continues from the checkpoint of step {saved}{lost}"


def _suspending_decision(run: RunSnapshot, message: str, actions: Actions) -> Decision:
    return _suspension_decision(run, ConditionUpdate("False", reasons.SUSPENDING, message), actions, over=False)


def _suspension_decision(
    run: RunSnapshot, suspended: ConditionUpdate, actions: Actions = NO_ACTIONS, *, over: bool
) -> Decision:
    report = run_progress.read_lease(run.observed.lease, run.attempt)
    away = ConditionUpdate("False", suspended.reason, suspended.message)
    engines = (reasons.INFERENCE_AVAILABLE,) if run.has_own_engines else ()
    updates: dict[str, ConditionUpdate | None] = {
        **dict.fromkeys((reasons.PODS_READY, *engines, reasons.PROGRESSING), away),
        **storage_at_rest(run),
        reasons.SUSPENDED: suspended,
        reasons.RESTARTING: ConditionUpdate("False", reasons.NOT_RESTARTING, "the run is being suspended, or is"),
        reasons.COMPLETE: None,  # a run that had only stayed for its guests passes through its end again
        **standing_conditions(run, pending=True),
    }
    if find_condition(run.past.conditions, reasons.SCHEDULED) is not None:
        updates[reasons.SCHEDULED] = away
    # `launched_attempt` stops the completion of an interrupted start, and a retry time of the time before the
    # suspension does not apply after it.
    change = StatusChange(
        attempt=run.attempt,
        launched_attempt=run.attempt,
        next_retry_time=None,
        completion_time=None,
        progress=run_progress.change_progress(
            run_progress.progress_after(run.past, report, run.total_steps, run.now),
            waiting_on=None,
            estimated_completion_time=None,
            tokens_per_second=None,
        ),
        checkpoint=run_progress.checkpoint_after(status_before_attempt(run), report, run.now),
    )
    return finish_decision(
        run, updates, status_builder.role_status(run, run.attempt, report, over=over) | change, actions
    )
