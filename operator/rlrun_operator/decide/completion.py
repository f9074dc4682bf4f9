"""End of a run: its GPUs are freed once all is done, and what its cleanup policy does not leave is removed."""

from __future__ import annotations

from rlrun_operator.decide import lifetime, status_builder
from rlrun_operator.decide.attempt_end import begun, ends_run, record, run_over
from rlrun_operator.decide.cause import cause_of
from rlrun_operator.decide.objects import parts
from rlrun_operator.decide.objects.corrections import engines_as_specified
from rlrun_operator.decide.reading.children import is_ending, uid_of
from rlrun_operator.decide.restart import hurried
from rlrun_operator.decide.running import configuration, of_inference
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.status_builder import finish
from rlrun_operator.state import Actions, Decision, Delete
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.conditions import Say, find, since
from rlrun_operator.times import rfc3339


def is_complete(case: Case) -> bool:
    """True if the orchestrator has said that all is done. It is the last word, also where a trainer failed on its way out."""
    completing = find(case.past.conditions, reasons.COMPLETE)
    if completing is not None and completing.reason in reasons.ENDING:
        return True
    pod = case.orchestrator(case.attempt)
    return pod is not None and (pod.phase == "Succeeded" or pod.exited_cleanly)


def complete(case: Case) -> Decision:
    """Free the GPUs, then call it complete; the orchestrator's pod stays for its log."""
    completing = find(case.past.conditions, reasons.COMPLETE)
    freeing_began = completing is not None and completing.reason == reasons.COMPLETING
    if case.joined_guests and not freeing_began and (decision := _stay(case)) is not None:
        return decision
    left = [pod for pod in case.pods if pod.role != "orchestrator"]
    keeps = lifetime.cleanup(case) == "None"
    over = keeps or (case.statefulset is None and not case.engine_deployments and not left)
    done = Say("True", reasons.COMPLETED, case.words.over)
    freeing = Say("False", reasons.COMPLETING, f"{case.words.over}; {_held(case)} being removed")
    said = _done(case, done if over else freeing, case.words.over)
    change = _trained(case, over=over and not keeps)
    change |= StatusChange(completion_time=rfc3339(case.now) if over else None)
    # What the end leaves, the next pass sees to: no event may come.
    delete = () if keeps else (*_deletions(case), *hurried(case))
    return finish(case, said, change, Actions(delete=delete, wake_in=0.0 if over else None), training=True)


def _done(case: Case, say: Say, message: str) -> dict[str, Say]:
    """Conditions of a run whose steps are all trained; `say`: Complete."""
    return {
        reasons.COMPLETE: say,
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration(case, pending=True),
        **run_over(case, message),
    }


def _trained(case: Case, *, over: bool) -> StatusChange:
    """Status of a run whose steps are all trained; `over`: no pod is desired any more."""
    heard = progress.read_lease(case.observed.lease, case.attempt)
    reached = progress.progressed(case.past, heard, case.total_steps, case.now)
    return status_builder.roles(case, case.attempt, heard, over=over) | StatusChange(
        attempt=case.attempt,
        next_retry_time=None,
        progress=progress.changed(reached, waiting_on=None, estimated_completion_time=None),
        checkpoint=progress.checkpointed(begun(case), heard, case.now),
    )


def _held(case: Case) -> str:
    """Parts that still hold GPUs, as the beginning of a sentence about several or one."""
    if not case.trains:
        return "the engines are"
    return "the trainer and the engines are" if case.serves else "the trainer is"


def _stay(case: Case) -> Decision | None:
    """Keep trainer and engines for the guests of a run that has trained all its own steps; None: they cannot be kept."""
    cause = cause_of(case, since(case.past.conditions, reasons.COMPLETE, true=False))
    if cause is not None and cause.role != "orchestrator" and case.spec is not None:
        return record(case, cause) if not ends_run(case, cause, case.spec) else None
    guests = ", ".join(case.joined_guests)
    message = f"all steps are trained; trainer and engines stay for the runs that share them: {guests}"
    ends = "they go when these are over; deleting them frees the GPUs now"
    say = Say("False", reasons.GUESTS_JOINED, f"{message}; {ends}")
    said = _done(case, say, "all steps are trained") | of_inference(case, case.attempt)
    scale, apply = engines_as_specified(case)
    beside = parts.see(case, case.attempt)
    actions = Actions(scale=scale, apply=apply, repair=beside.repair, wake_in=beside.wake_in)
    return finish(case, {**said, **beside.said}, _trained(case, over=False), actions, training=True)


def ended(case: Case) -> Decision:
    """A terminal state absorbs; what `cleanupPolicy` does not leave is removed. Pods that train still get the time to save."""
    policy = lifetime.cleanup(case)
    orphans = [p for p in case.group if p.works and (p.role == "orchestrator" or case.statefulset is None)]
    if policy == "All":
        orphans = [p for p in case.group if p.deleted_at is None and (p in orphans or p.role == "orchestrator")]
    ends = [*_deletions(case), *(Delete(pod.ref, pod.uid) for pod in orphans), *hurried(case)]
    delete = [] if policy == "None" else ends
    heard = progress.read_lease(case.observed.lease, case.past.attempt)
    change = StatusChange(checkpoint=progress.checkpointed(case.past, heard, case.now))
    roles = status_builder.roles(case, case.past.attempt, heard, over=policy != "None")
    return finish(case, {}, roles | change, Actions(delete=delete))


def _deletions(case: Case) -> list[Delete]:
    trainer = [(case.trainer_ref, case.statefulset)] if case.statefulset is not None else []
    return [Delete(ref, uid_of(child)) for ref, child in (*trainer, *case.engine_deployments) if not is_ending(child)]
