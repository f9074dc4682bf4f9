"""The brain: from everything that is known of one run to what is to be done next. A pure function of its arguments.

    Pending ──> Starting ──> Running ──> Completing ──> Complete
                  ^  └───────────┴──> Restarting ─┐
                  └───────────────────────────────┘      any ──> Failed, any ──> Suspending ──> Suspended ──> Starting

Queued lies between Pending and Starting, once it exists. Every pass begins from
what is observed, never from what an earlier pass meant to do: a crash between any two requests costs one more pass and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlrun_operator.decide import (
    growth,
    host_run,
    keys,
    lifetime,
    manual_restart,
    parts,
    stall,
    status_builder,
    suspend,
    volumes,
)
from rlrun_operator.decide.attempt import begun, ends_run, fail, give_up, hurried, launch, record, restart, run_over
from rlrun_operator.decide.running import configuration, engines_as_specified, finish, follow, of_inference
from rlrun_operator.decide.snapshot import Case, is_ending, replicas, uid_of
from rlrun_operator.failures import detect, node_exclusion
from rlrun_operator.failures.detect import Cause
from rlrun_operator.pods import Pod
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Decision, Delete, Observed
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.conditions import Say, find, is_true, since
from rlrun_operator.times import rfc3339


def decide(observed: Observed, now: float, *, settings: RenderSettings, fresh_key: str, random: float) -> Decision:
    """Decision about a run.

    Args:
        observed: everything that is known about it.
        now: seconds since the epoch.
        settings: for rendering children.
        fresh_key: a new API key; used only where a Secret is created.
        random: in [0, 1), for the jitter of backoffs.
    """
    case = Case(observed, now, settings, fresh_key, random)
    if "deletionTimestamp" in case.metadata:  # owner references do the rest
        return Decision(status=observed.run.get("status") or {}, urgency="progress")
    decision = manual_restart.told_of_nonsense(case, _decide(case))
    decision = replace(decision, grow=growth.wanted(case), ask=decision.ask or keys.in_doubt(case))
    clocks = [decision.wake_in, lifetime.seconds_left(case), lifetime.seconds_to_live(case)]
    return replace(decision, wake_in=min((s for s in clocks if s is not None and s >= 0), default=None))


def _decide(case: Case) -> Decision:
    past = case.past
    mended = _mended(case)
    if (is_true(past.conditions, reasons.COMPLETE) or is_true(past.conditions, reasons.FAILED)) and not mended:
        return manual_restart.revived(case) or _ended(
            case
        )  # one that shall be suspended too: what it begins again for is on record first
    launched = past.attempt > 0 and past.launched_attempt >= past.attempt == case.attempt
    restarting = is_true(past.conditions, reasons.RESTARTING)
    more = lifetime.has_more_steps(case)
    suspended = suspend.suspension(case)
    if _is_complete(case) and not (restarting and (case.joined_guests or more)):
        if more:
            return suspended or manual_restart.more_steps(case)
        if suspended is None or not case.joined_guests:
            return _complete(case)
    if suspended is not None:
        return suspended
    left = lifetime.seconds_left(case)
    if left is not None and left <= 0:
        return fail(case, reasons.DEADLINE_EXCEEDED, lifetime.deadline_message(case))
    if case.spec is None and not launched:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    if (asked := manual_restart.asked(case, is_restarting=restarting)) is not None:
        return asked
    if (restarting or mended) and case.attempt == past.attempt > 0:
        return restart(case)
    if case.spec is not None and not launched:
        return launch(case, case.spec, max(case.attempt, 1))
    cause = _cause(case, _settled_at(case))
    if cause is None and (hangs := stall.cause(case)) is not None:
        return give_up(case, hangs) if stall.ends_run(case) else record(case, hangs)
    return record(case, cause) if cause is not None else follow(case, past.attempt)


def _cause(case: Case, settled_at: float | None) -> Cause | None:
    """Why the current attempt cannot go on. A guest's ends with its host's, and what the host's trainer breaks does not count."""
    attempt = case.past.attempt
    guest = case.host_name is not None
    lost = host_run.lost(case.observed.run, case.observed.host, case.host_mark(attempt)) if guest else None
    if lost is not None:
        return lost
    cause = detect.first_cause(
        _without_surplus(case, case.pods),
        _without_surplus(case, case.gone),
        attempt,
        case.names,
        trainers=min(case.wanted.trainers, replicas(case.statefulset)),
        has_statefulset=guest or not case.trains or (case.statefulset is not None and not is_ending(case.statefulset)),
        settled_at=settled_at,
        now=case.now,
    )
    if guest and cause is not None and cause.kind == "failure" and not host_run.trainer_ready(case.observed.host):
        return replace(cause, kind="disruption")
    return (
        cause
        or volumes.withheld(case)
        or parts.withheld(case)
        or keys.withheld(case)
        or node_exclusion.lifted(case.pods_of_attempt(attempt), case.past, case.now)
    )


def _without_surplus(case: Case, pods: Iterable[Pod]) -> list[Pod]:
    """Pods without those that nobody asks for: a StatefulSet takes in, and ends, what somebody has made with its labels."""
    most = max(case.wanted.trainers, replicas(case.statefulset))
    return [
        p for p in pods if p.role != "trainer" or case.host_name is not None or int(p.name.rpartition("-")[2]) < most
    ]


def _mended(case: Case) -> bool:
    """Whether the run failed by its specification alone and has another one now, or by a policy that allows it now."""
    failed = find(case.past.conditions, reasons.FAILED)
    if failed is None or failed.status != "True":
        return False
    edited = case.generation != case.past.observed_generation
    if failed.reason == reasons.FORBIDDEN:
        return edited or (case.spec is not None and not case.forbidden)
    return failed.reason == reasons.INVALID_CONFIGURATION and edited


def _settled_at(case: Case) -> float | None:
    """When the attempt's pods were all ready, as far as the status remembers: it trains, or PodsReady is true still."""
    times = [
        since(case.past.conditions, reasons.PODS_READY, true=True),
        since(case.past.conditions, reasons.RECONCILING, true=False),
    ]
    return min((t for t in times if t is not None), default=None)


def _is_complete(case: Case) -> bool:
    """Whether the orchestrator has said that all is done. It is the last word, also where a trainer failed on its way out."""
    completing = find(case.past.conditions, reasons.COMPLETE)
    if completing is not None and completing.reason in reasons.ENDING:
        return True
    pod = case.orchestrator(case.attempt)
    return pod is not None and (pod.phase == "Succeeded" or (pod.exit is not None and pod.exit.code == 0))


def _complete(case: Case) -> Decision:
    """Free the GPUs, then call it complete; the orchestrator's pod stays for its log."""
    completing = find(case.past.conditions, reasons.COMPLETE)
    freeing_began = completing is not None and completing.reason == reasons.COMPLETING
    if case.joined_guests and not freeing_began and (decision := _stay(case)) is not None:
        return decision
    heard = progress.read_lease(case.observed.lease, case.attempt)
    left = [pod for pod in case.pods if pod.role != "orchestrator"]
    keeps = lifetime.cleanup(case) == "None"
    over = keeps or (case.statefulset is None and case.deployment is None and not left)
    done = Say("True", reasons.COMPLETED, case.words.over)
    freeing = Say(
        "False",
        reasons.COMPLETING,
        f"{case.words.over}; {_held(case)} being removed",
    )
    said = {
        reasons.COMPLETE: done if over else freeing,
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration(case, pending=True),
        **run_over(case, case.words.over),
    }
    updates = {
        **status_builder.roles(case, case.attempt, heard, over=over and not keeps),
        "attempt": case.attempt,
        "next_retry_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now).model_copy(
            update={"waiting_on": None, "estimated_completion_time": None}
        ),
        "checkpoint": progress.checkpointed(begun(case), heard, case.now),
        "completion_time": rfc3339(case.now) if over else None,
    }
    new = status_builder.status(case, said, updates, training=True)
    # What the end leaves, the next pass sees to: no event may come.
    return finish(case, new, delete=() if keeps else [*_deletions(case), *hurried(case)], wake_in=0.0 if over else None)


def _held(case: Case) -> str:
    """What still holds GPUs, as the beginning of a sentence about several or one."""
    if not case.trains:
        return "the engines are"
    return "the trainer and the engines are" if case.serves else "the trainer is"


def _stay(case: Case) -> Decision | None:
    """Keep trainer and engines for the guests of a run that has trained all its own steps; None: they cannot be kept."""
    cause = _cause(case, since(case.past.conditions, reasons.COMPLETE, true=False))
    if cause is not None and cause.role != "orchestrator" and case.spec is not None:
        return record(case, cause) if not ends_run(case, cause, case.spec) else None
    guests = ", ".join(case.joined_guests)
    message = f"all steps are trained; trainer and engines stay for the runs that share them: {guests}"
    ends = "they go when these are over; deleting them frees the GPUs now"
    heard = progress.read_lease(case.observed.lease, case.attempt)
    said = {
        reasons.COMPLETE: Say("False", reasons.GUESTS_JOINED, f"{message}; {ends}"),
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration(case, pending=True),
        **run_over(case, "all steps are trained"),
        **of_inference(case, case.attempt),
    }
    updates = {
        **status_builder.roles(case, case.attempt, heard),
        "attempt": case.attempt,
        "next_retry_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now).model_copy(
            update={"waiting_on": None, "estimated_completion_time": None}
        ),
        "checkpoint": progress.checkpointed(begun(case), heard, case.now),
    }
    scale, apply = engines_as_specified(case)
    beside = parts.see(case, case.attempt)
    new = status_builder.status(case, {**said, **beside.said}, updates, training=True)
    return finish(case, new, scale=scale, apply=apply, repair=beside.repair, wake_in=beside.wake_in)


def _ended(case: Case) -> Decision:
    """A terminal state absorbs; what `cleanupPolicy` does not leave is removed. Pods that train still get the time to save."""
    policy = lifetime.cleanup(case)
    orphans = [p for p in case.group if p.works and (p.role == "orchestrator" or case.statefulset is None)]
    if policy == "All":
        orphans = [p for p in case.group if p.deleted_at is None and (p in orphans or p.role == "orchestrator")]
    ends = [*_deletions(case), *(Delete(pod.ref, pod.uid) for pod in orphans), *hurried(case)]
    delete = [] if policy == "None" else ends
    heard = progress.read_lease(case.observed.lease, case.past.attempt)
    updates = {
        **status_builder.roles(case, case.past.attempt, heard, over=policy != "None"),
        "checkpoint": progress.checkpointed(case.past, heard, case.now),
    }
    return finish(case, status_builder.status(case, {}, updates, training=False), delete=delete)


def _deletions(case: Case) -> list[Delete]:
    workloads = ((case.trainer_ref, case.statefulset), (case.inference_ref, case.deployment))
    held = [(ref, child) for ref, child in workloads if child is not None and not is_ending(child)]
    return [Delete(ref, uid_of(child)) for ref, child in held]
