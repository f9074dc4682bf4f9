"""The brain: from everything that is known of one run to what is to be done next. A pure function of its arguments.

    Pending ──> Starting ──> Running ──> Completing ──> Complete
                  ^  └───────────┴──> Restarting ─┐
                  └───────────────────────────────┘      any ──> Failed

Queued lies between Pending and Starting, Suspending and Suspended between Running and Queued, once they exist. Every pass begins from
what is observed, never from what an earlier pass meant to do: a crash between any two requests costs one more pass and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator import failures, hosts, progress, reasons, report
from rlrun_operator.attempts import fail, launch, record, restart, run_over
from rlrun_operator.case import Case, is_ending, replicas
from rlrun_operator.conditions import Say, find, is_true, since
from rlrun_operator.failures import Cause
from rlrun_operator.follow import configuration, engines_as_specified, finish, follow, of_inference
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Decision, Delete, Observed
from rlrun_operator.times import rfc3339


def decide(observed: Observed, now: float, *, settings: RenderSettings, fresh_key: str, random: float) -> Decision:
    """What to do about a run.

    Args:
        observed: everything that is known about it.
        now: seconds since the epoch.
        settings: for rendering children.
        fresh_key: a new API key; used only where a Secret is created.
        random: in [0, 1), for the jitter of backoffs.
    """
    case = Case(observed, now, settings, fresh_key, random)
    past = case.past
    if "deletionTimestamp" in case.metadata:  # owner references do the rest
        return Decision(status=observed.run.get("status") or {}, urgency="progress")
    mended = _mended(case)
    if (is_true(past.conditions, reasons.COMPLETE) or is_true(past.conditions, reasons.FAILED)) and not mended:
        return _ended(case)
    launched = past.attempt > 0 and past.launched_attempt >= past.attempt == case.attempt
    restarting = is_true(past.conditions, reasons.RESTARTING)
    if case.spec is None and not launched:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    if _is_complete(case) and not (restarting and case.joined_guests):
        return _complete(case)
    if (restarting or mended) and case.attempt == past.attempt > 0:
        return restart(case)
    if case.spec is not None and not launched:
        return launch(case, case.spec, max(case.attempt, 1))
    cause = _cause(case, _settled_at(case))
    return record(case, cause) if cause is not None else follow(case, past.attempt)


def _cause(case: Case, settled_at: float | None) -> Cause | None:
    """Why the current attempt cannot go on. A guest's ends with its host's, and what the host's trainer breaks does not count."""
    attempt = case.past.attempt
    guest = case.host_name is not None
    lost = hosts.lost(case.observed.run, case.observed.host, case.host_mark(attempt)) if guest else None
    if lost is not None:
        return lost
    cause = failures.first_cause(
        case.pods,
        case.gone,
        attempt,
        case.names,
        trainers=min(case.wanted.trainers, replicas(case.statefulset)),
        has_statefulset=guest or (case.statefulset is not None and not is_ending(case.statefulset)),
        settled_at=settled_at,
        now=case.now,
    )
    if guest and cause is not None and cause.kind == "failure" and not hosts.trainer_ready(case.observed.host):
        return replace(cause, kind="disruption")
    return cause


def _mended(case: Case) -> bool:
    """Whether the run failed by its specification alone and has another one now."""
    failed = find(case.past.conditions, reasons.FAILED)
    invalid = failed is not None and failed.status == "True" and failed.reason == reasons.INVALID_CONFIGURATION
    return invalid and case.generation != case.past.observed_generation


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
    over = case.statefulset is None and case.deployment is None and not left
    done = Say("True", reasons.COMPLETED, "all steps are trained")
    freeing = Say(
        "False",
        reasons.COMPLETING,
        f"all steps are trained; the trainer {'and the engines are' if case.serves else 'is'} being removed",
    )
    said = {
        reasons.COMPLETE: done if over else freeing,
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "no restart is under way"),
        reasons.CONFIGURATION_VALID: configuration(case, pending=True),
        **run_over(case, "all steps are trained"),
    }
    updates = {
        **report.roles(case, case.attempt, heard, over=over),
        "attempt": case.attempt,
        "next_retry_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now).model_copy(
            update={"waiting_on": None, "estimated_completion_time": None}
        ),
        "checkpoint": progress.checkpointed(case.past, heard, case.now),
        "completion_time": rfc3339(case.now) if over else None,
    }
    new = report.status(case, said, updates, training=True)
    return finish(case, new, delete=_deletions(case))


def _stay(case: Case) -> Decision | None:
    """Keep trainer and engines for the guests of a run that has trained all its own steps; None: they cannot be kept."""
    cause = _cause(case, since(case.past.conditions, reasons.COMPLETE, true=False))
    if cause is not None and cause.role != "orchestrator" and case.spec is not None:
        counted = case.past.restarts_counted_towards_max
        what = failures.verdict(cause, counted=counted, policy=case.spec.failure_policy, random=case.random)
        return record(case, cause) if what.fails is None else None
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
        **report.roles(case, case.attempt, heard),
        "attempt": case.attempt,
        "next_retry_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now).model_copy(
            update={"waiting_on": None, "estimated_completion_time": None}
        ),
        "checkpoint": progress.checkpointed(case.past, heard, case.now),
    }
    scale, apply = engines_as_specified(case)
    return finish(case, report.status(case, said, updates, training=True), scale=scale, apply=apply)


def _ended(case: Case) -> Decision:
    """A terminal state absorbs; what still holds GPUs is removed."""
    running = [p for p in case.group if p.deleted_at is None and p.phase not in ("Succeeded", "Failed")]
    orphans = [p for p in running if p.role == "orchestrator" or case.statefulset is None]
    delete = [*_deletions(case), *(Delete(pod.ref, pod.uid) for pod in orphans)]
    new = report.status(case, {}, report.roles(case, case.past.attempt, None, over=True), training=False)
    return finish(case, new, delete=delete)


def _deletions(case: Case) -> list[Delete]:
    workloads = ((case.trainer_ref, case.statefulset), (case.inference_ref, case.deployment))
    held = [(ref, child) for ref, child in workloads if child is not None and not is_ending(child)]
    return [Delete(ref, str(child["metadata"]["uid"])) for ref, child in held]
