"""Suspension: a graceful stop that saves, then the engines, then nothing; and from there the next attempt.

    any ──> Suspending ──> Suspended ──> the next attempt, which does not count

The intent is on record (condition Suspended, reason Suspending) before anything is removed, and from then on it does not matter what
`spec.suspend` says until all pods are gone: the trainer's pods and the orchestrator get SIGTERM together, which makes them complete a
checkpoint of the last finished step; the engines go when they are gone. The volume and the small objects stay.
"""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator.decide import queueing, status_builder
from rlrun_operator.decide.attempt import launch, next_attempt
from rlrun_operator.decide.attempt_end import begun
from rlrun_operator.decide.cost import budget
from rlrun_operator.decide.reading.children import has_let_go, is_ending, uid_of
from rlrun_operator.decide.restart import listed, overdue, removals, settles_in
from rlrun_operator.decide.running import standing, storage_at_rest
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.status_builder import finish
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Decision, Delete
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import Say, find, is_true
from rlrun_operator.validate_spec import counted


def is_wanted(case: Case) -> bool:
    """True if the run's user suspends it, or its budget is spent; the rest of the specification may be invalid."""
    return queueing.shall_rest(case)


def suspension(case: Case) -> Decision | None:
    """The next thing to do on the way into suspension, in it, or out of it; None: the run is none of this."""
    said = find(case.past.conditions, reasons.SUSPENDED)
    under_way = said is not None and said.reason in reasons.SUSPENSION
    if not under_way:
        return _begin(case) if is_wanted(case) or queueing.stops(case) else None
    if not is_wanted(case) and is_true(case.past.conditions, reasons.SUSPENDED):
        return _resume(case)
    return _stop(case)


def _begin(case: Case) -> Decision:
    """Put it on record. An attempt whose children are not all there yet is not completed any more: hence `launched_attempt`."""
    return _say(case, f"the run is about to be stopped{_because(case)}", AT_ONCE)


def _because(case: Case) -> str:
    """Reason of a suspension that its user does not ask for, as the end of a sentence."""
    if queueing.is_suspended_by_user(case):
        return ""
    if budget.is_spent(case):
        return f": {budget.spent_message(case)}"
    return f": {queueing.stopping_words(case)}" if case.observed.admission is not None else ""


def _stop(case: Case) -> Decision:
    """Remove what is left, in its order; once nothing is left the run is Suspended."""
    scale, delete = removals(case)
    names = sorted(pod.name for pod in case.group)
    stuck = overdue(case, suspending=True)
    ends = Actions(wake_in=stuck.look_in, look_up=frozenset(("nodes",)) if stuck.nodes_would_help else frozenset())
    if names or not has_let_go(case.statefulset):
        what = f"{_both(case)} save and end{f': {stuck.told}' if stuck.told else listed(names)}"
        return _say(case, what, replace(ends, scale=scale, delete=[*delete, *stuck.force]))
    engines = [Delete(ref, uid_of(child)) for ref, child in case.engine_deployments if not is_ending(child)]
    if engines:
        return _say(case, f"{_both(case)} are gone; the engines are removed", Actions(delete=tuple(engines)))
    if case.pods or case.engine_deployments:
        left = f": {stuck.told}" if stuck.told else listed(sorted(pod.name for pod in case.pods))
        return _say(case, f"the engines end{left}", replace(ends, delete=stuck.force))
    if (settles := settles_in(case, reasons.SUSPENDED)) > 0:
        return _say(case, "no pod is seen any more", Actions(wake_in=settles))
    return _rest(case)


def _both(case: Case) -> str:
    return "trainer and orchestrator" if case.trains else "the orchestrator's pods"


def _rest(case: Case, waits_for: str = "") -> Decision:
    """Zero pods. `waits_for`: why it does not resume although it should."""
    if waits_for:
        return _written(case, Say("True", reasons.SUSPENDED, f"the run stays suspended: {waits_for}"), over=True)
    message = f"no pod is left; {where_it_goes_on(case)}, {_awaited(case)}"
    actions = NO_ACTIONS if is_wanted(case) else AT_ONCE
    if queueing.stops(case):
        actions = Actions(wake_in=queueing.LOOK_SECONDS)  # the queue's next plan wakes the run before
    return _written(case, Say("True", reasons.SUSPENDED, message), actions, over=True)


def _awaited(case: Case) -> str:
    """Condition that a suspended run waits for, as the end of a sentence."""
    waits = ["spec.suspend is false"] if queueing.is_suspended_by_user(case) else []
    if budget.is_spent(case):
        waits.append(f"budget.gpuHours is more than the {budget.gpu_hours(case):g} that are spent")
    answer = case.observed.admission
    if not waits and answer is not None and not answer.admitted:
        waits.append("the queue has room for it")
    return f"when {' and '.join(waits)}" if waits else "at once"


def _resume(case: Case) -> Decision:
    """Begin the next attempt, or take over one whose children were made before its beginning was on record."""
    is_begun = case.attempt > case.past.attempt
    if any(pod.attempt <= case.past.attempt for pod in case.group) or not (is_begun or has_let_go(case.statefulset)):
        return _stop(case)  # pods that appeared after all
    if queueing.stops(case):
        return _stop(case)  # its room is taken back in the middle of its beginning
    host = case.host_available
    if case.spec is None:
        fix = "set spec.suspend to true, mend it, and set it to false"
        return _stop(case) if is_begun else _rest(case, f"its specification is invalid: {case.problems}; {fix}")
    if case.forbidden:
        fix = "correct it while spec.suspend is true, and resume it"
        return _stop(case) if is_begun else _rest(case, f"{case.forbidden}; {fix}")
    if not is_begun and host is not None and host.status != "True":
        return _rest(case, host.message)  # not as one that waits between two attempts: that would hold a slot
    if (queued := queueing.awaited(case)) is not None:
        if is_begun:
            return _stop(case)  # made before its room was given away, and seen only now
        actions = AT_ONCE if queued.status == "True" else Actions(wake_in=queueing.LOOK_SECONDS)
        return _written(case, Say("True", reasons.SUSPENDED, f"no pod is left; {queued.message}"), actions, over=True)
    return launch(case, case.spec, case.attempt if is_begun else (next_attempt(case) if case.attempt else 1))


def where_it_goes_on(case: Case) -> str:
    """Step from which the next attempt trains, as far as the orchestrator has reported."""
    done, saved = case.past.progress.step, case.past.checkpoint.latest_complete_step
    if not case.past.attempt:
        return "its first attempt begins"
    if not case.trains:
        return f"it asks what is not answered yet ({case.past.steps})"
    if not saved:
        return f"it begins again from the model ({counted(done, 'step')} lost)" if done else "it begins from the model"
    lost = f"; {counted(done - saved, 'step')} trained after it are trained again" if done > saved else ""
    return f"it goes on from the checkpoint of step {saved}{lost}"


def _say(case: Case, message: str, actions: Actions) -> Decision:
    return _written(case, Say("False", reasons.SUSPENDING, message), actions, over=False)


def _written(case: Case, suspended: Say, actions: Actions = NO_ACTIONS, *, over: bool) -> Decision:
    heard = progress.read_lease(case.observed.lease, case.attempt)
    away = Say("False", suspended.reason, suspended.message)
    engines = (reasons.INFERENCE_AVAILABLE,) if case.serves else ()
    said: dict[str, Say | None] = {
        **dict.fromkeys((reasons.PODS_READY, *engines, reasons.PROGRESSING), away),
        **storage_at_rest(case),
        reasons.SUSPENDED: suspended,
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "the run is being suspended, or is"),
        reasons.COMPLETE: None,  # a run that had stayed for its guests alone goes through its end once more
        **standing(case, pending=True),
    }
    if find(case.past.conditions, reasons.SCHEDULED) is not None:
        said[reasons.SCHEDULED] = away
    change = StatusChange(
        attempt=case.attempt,
        launched_attempt=case.attempt,
        next_retry_time=None,
        completion_time=None,
        progress=progress.changed(
            progress.progressed(case.past, heard, case.total_steps, case.now),
            waiting_on=None,
            estimated_completion_time=None,
            tokens_per_second=None,
        ),
        checkpoint=progress.checkpointed(begun(case), heard, case.now),
    )
    return finish(case, said, status_builder.roles(case, case.attempt, heard, over=over) | change, actions)
