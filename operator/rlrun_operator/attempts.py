"""How attempts begin and end.

An attempt ends in two passes: the cause is on record before anything is removed, because removing the pods destroys the evidence. It
begins in one: children first, then the status, so that a crash between the two leaves children whose label names the attempt, and the
next pass takes it over. Its pods are made only when no trainer or orchestrator pod of another attempt is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlrun.api.resource import RLRunSpec
from rlrun.api.status import FailureRecord, SharedWithStatus
from rlrun_operator import build, failures, progress, reasons, report
from rlrun_operator.case import Case, has_let_go, hash_of, is_ending, replicas
from rlrun_operator.conditions import Say, is_true
from rlrun_operator.failures import Cause
from rlrun_operator.follow import configuration, finish, follow, of_inference, storage_status
from rlrun_operator.names import attempt_of
from rlrun_operator.state import Apply, Decision, Delete, Manifest, Scale
from rlrun_operator.times import rfc3339, seconds_of

FAILURES_KEPT = 5
"""Of `status.failures`."""
LOOK_AGAIN_SECONDS = 2.0
"""Where only the cache lags, or objects of others have to go: no event may come."""


def next_attempt(case: Case) -> int:
    """The number of the attempt after all that are known, and after those that the volume knows of."""
    failure, number = case.past.last_failure, case.attempt + 1
    if failure is not None and failure.reason == reasons.NUMBER_TAKEN and failure.attempt == case.past.attempt:
        number = max(number, failures.next_number(failure.message) or 0)
    return number


def launch(case: Case, spec: RLRunSpec, attempt: int) -> Decision:
    """Make what `attempt` needs and does not have yet."""
    if case.strangers:
        return _wait_for_strangers(case)
    waits = _wait_for_host(case, attempt)
    if waits is not None:
        return waits
    made = build.workloads(case.context(spec, attempt)).made
    recorded = case.past.attempt == attempt
    meant = case.past.spec_hash if recorded else case.spec_hash
    there = _there(case, attempt, meant)
    whole = len(there) == len(made)
    if any(hash_of(child) != meant for child in there.values()) or (meant != case.spec_hash and not whole):
        return _begin_again(case, attempt)
    applies = [a for a in _applies(case, made, recorded) if a.manifest["kind"] not in there]
    updates: dict[str, Any] = {}
    if whole:
        updates["launched_attempt"] = attempt
    case = replace(case, beginning=True)
    if recorded:  # the whole pass of the beginning is done: what is missing is on its way into the cache
        return follow(case, attempt, updates=updates, apply=applies, wake_in=None if updates else LOOK_AGAIN_SECONDS)
    needs = build.prerequisites(case.context(spec, attempt))
    create = [child for child in needs.create if not _exists(case, child)]
    if case.past.launched_attempt == 0 and case.host is None:
        create.append(build.api_key_secret(case.context(spec, attempt), case.fresh_key))
    updates |= {
        "attempt": attempt,
        "start_time": case.past.start_time or rfc3339(case.now),
        "completion_time": None,
        "next_retry_time": None,
        "spec_hash": case.spec_hash,
        "config_hash": build.config(case.context(spec, attempt)).hash(),
        "checkpoint": case.past.checkpoint.model_copy(update={"resumed_from_step": None}),
        "progress": _progress_of_before(case, spec),
    }
    if case.host is not None:
        updates["shared_with"] = SharedWithStatus(run=case.host.name, attempt=case.host.attempt)
    return follow(
        case,
        attempt,
        updates=updates,
        create=create,
        apply=[*(Apply(child) for child in needs.apply), *applies],
        dry_run=made if not there and case.past.spec_hash != case.spec_hash else (),
    )


def record(case: Case, cause: Cause) -> Decision:
    """Put on record why the current attempt ends, and what follows; the next pass acts."""
    if case.spec is None:
        told = f"attempt {case.past.attempt} ended ({failures.told_of(cause)}), and the specification is invalid: {case.problems}"
        return fail(case, reasons.INVALID_CONFIGURATION, told, _failure(case, cause, counted=False))
    past = case.past
    what = failures.verdict(
        cause, counted=past.restarts_counted_towards_max, policy=case.spec.failure_policy, random=case.random
    )
    failure = _failure(case, cause, counted=what.counted)
    if what.fails is not None:
        return fail(case, *what.fails, failure)
    retry = rfc3339(math.ceil(case.now + what.wait_seconds)) if what.wait_seconds else None
    return _restarting(
        case,
        f"attempt {past.attempt} ended: {failures.told_of(cause)}",
        reasons.PODS_ENDING,
        wake_in=0.0,
        last_failure=failure,
        failures=[*past.failures, failure][-FAILURES_KEPT:],
        restarts=past.restarts + 1,
        restarts_counted_towards_max=past.restarts_counted_towards_max + what.counted,
        next_retry_time=retry,
    )


def fail(case: Case, reason: str, message: str, failure: FailureRecord | None = None) -> Decision:
    """End the run for good; the next pass frees its GPUs."""
    past, attempt = case.past, case.past.attempt
    heard = progress.read_lease(case.observed.lease, attempt)
    said = {
        reasons.FAILED: Say("True", reason, message),
        reasons.CONFIGURATION_VALID: configuration(case, pending=False),
        reasons.RESTARTING: Say("False", reasons.NOT_RESTARTING, "the run has failed"),
        **run_over(case, "the run has failed"),
    }
    updates: dict[str, Any] = {
        "completion_time": rfc3339(case.now),
        "next_retry_time": None,
        "progress": progress.progressed(past, heard, case.total_steps, case.now),
        "checkpoint": progress.checkpointed(past, heard, case.now),
    }
    if failure is not None:
        updates |= {"last_failure": failure, "failures": [*past.failures, failure][-FAILURES_KEPT:]}
    new = report.status(case, said, updates, training=False)
    return finish(case, new, wake_in=0.0)


def restart(case: Case) -> Decision:
    """Remove the ended attempt's pods; once they are gone and the backoff is over, begin the next attempt."""
    scale, delete = _removals(case)
    left = sorted(pod.name for pod in case.group)
    past, retry_at = case.past, seconds_of(case.past.next_retry_time)
    ended = past.last_failure
    because = f"attempt {past.attempt} ended"
    if ended is not None and ended.attempt == past.attempt:
        code = "" if ended.exit_code is None else f" (exit code {ended.exit_code})"
        because += f": {ended.role} pod {ended.pod_name}{code}: {ended.message}"
    if left or not has_let_go(case.statefulset):
        pods = f" ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ""
        return _restarting(
            case, f"{because}; waiting for its pods to be gone{pods}", reasons.PODS_ENDING, scale=scale, delete=delete
        )
    if retry_at is not None and case.now < retry_at:
        message = f"{because}; the next attempt begins at {past.next_retry_time}"
        return _restarting(case, message, reasons.BACK_OFF, wake_in=retry_at - case.now)
    if case.spec is None:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    return launch(case, case.spec, next_attempt(case))


def run_over(case: Case, message: str) -> dict[str, Say]:
    """Conditions of a run that has ended."""
    engines = (reasons.INFERENCE_AVAILABLE,) if case.serves else ()
    host = (reasons.HOST_AVAILABLE,) if case.host_name is not None else ()
    kinds = (reasons.PODS_READY, *engines, *host, reasons.PROGRESSING)
    return {kind: Say("False", reasons.RUN_OVER, message) for kind in kinds}


def _restarting(
    case: Case,
    message: str,
    reason: str,
    *,
    scale: list[Scale] | None = None,
    delete: list[Delete] | None = None,
    wake_in: float | None = None,
    **updates: Any,
) -> Decision:
    attempt = case.past.attempt
    heard = progress.read_lease(case.observed.lease, attempt)
    said: dict[str, Say | None] = {
        reasons.RESTARTING: Say("True", reason, message),
        reasons.CONFIGURATION_VALID: configuration(case, pending=True),
        reasons.PODS_READY: Say("False", reasons.PODS_ENDING, "the ended attempt's pods are being removed"),
        reasons.PROGRESSING: Say("False", reasons.RESTARTING, "the run restarts"),
        reasons.COMPLETE: None,  # a run that had stayed for its guests alone goes through its end once more
        **of_inference(case, attempt),
    }
    if case.host_available is not None:
        said[reasons.HOST_AVAILABLE] = case.host_available
    if is_true(case.past.conditions, reasons.FAILED):
        said[reasons.FAILED] = Say("False", reasons.NOT_FAILED, "the run has not failed")
    fields: dict[str, Any] = {
        **report.roles(case, attempt, heard),
        "attempt": attempt,
        "completion_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now),
        "checkpoint": progress.checkpointed(case.past, heard, case.now),
        **updates,
    }
    new = report.status(case, said, fields, training=False)
    return finish(case, new, scale=scale or (), delete=delete or (), wake_in=wake_in)


def _wait_for_strangers(case: Case) -> Decision:
    shown = ", ".join(case.strangers[:4]) + (", …" if len(case.strangers) > 4 else "")
    message = f"of a deleted run of this name there is still: {shown}; this run begins when they are gone"
    said = {
        reasons.SCHEDULED: Say("False", reasons.PREVIOUS_RUN_ENDING, message),
        reasons.CONFIGURATION_VALID: configuration(case, pending=False),
    }
    updates = {
        "storage": storage_status(case),
        "progress": case.past.progress.model_copy(update={"total_steps": case.total_steps}),
    }
    new = report.status(case, said, updates, training=False)
    return finish(case, new, wake_in=LOOK_AGAIN_SECONDS)


def _wait_for_host(case: Case, attempt: int) -> Decision | None:
    """What a guest does that its host cannot take; None: it can, or `attempt` has begun and `decide` sees to it."""
    say = case.host_available
    if say is None or say.status == "True" or (case.orchestrator(attempt) is not None and case.host is not None):
        return None
    if case.attempt:
        begun = case.past.attempt == attempt
        return _restarting(
            case,
            f"the next attempt waits for the host: {say.message}",
            say.reason,
            wake_in=0.0 if begun else None,
            attempt=case.attempt,
            launched_attempt=case.attempt,
        )
    said = {reasons.HOST_AVAILABLE: say, reasons.CONFIGURATION_VALID: configuration(case, pending=False)}
    updates = {
        "storage": storage_status(case),
        "progress": case.past.progress.model_copy(update={"total_steps": case.total_steps}),
        "shared_with": report.shared_with(case),
    }
    return finish(case, report.status(case, said, updates, training=False))


def _begin_again(case: Case, attempt: int) -> Decision:
    """The specification was edited between two children of one attempt: it ends unseen, and its successor is made whole."""
    what = "the specification was edited before all pods existed"
    return _restarting(
        case,
        f"attempt {attempt} is made again: {what}",
        reasons.PODS_ENDING,
        wake_in=0.0,
        attempt=attempt,
        launched_attempt=attempt,
    )


def _there(case: Case, attempt: int, meant: str | None) -> dict[str, Manifest]:
    """The attempt's workloads that exist, by kind. Engines outlive attempts: theirs is there if it has the specification that is meant."""
    result: dict[str, Manifest] = {}
    if case.statefulset is not None and attempt_of(case.statefulset["metadata"]) == attempt:
        result["StatefulSet"] = case.statefulset
    deployment = case.deployment
    if deployment is not None and (hash_of(deployment) == meant or attempt_of(deployment["metadata"]) == attempt):
        result["Deployment"] = deployment
    orchestrator = case.orchestrator(attempt)
    if orchestrator is not None:
        result["Pod"] = orchestrator.manifest
    return result


def _applies(case: Case, made: Sequence[Manifest], recorded: bool) -> list[Apply]:
    """Workloads in the order of their making. A cached one of an older attempt is not made again once the beginning is on record."""
    older = {"StatefulSet": case.statefulset, "Deployment": case.deployment, "Pod": None}
    kept = [child for child in made if older[child["kind"]] is None or not recorded]
    return [Apply(child, expect_absent=older[child["kind"]] is None) for child in kept]


def _exists(case: Case, child: Manifest) -> bool:
    if child["kind"] == "Lease":
        return case.observed.lease is not None
    return case.claim is not None


def _progress_of_before(case: Case, spec: RLRunSpec) -> Any:
    """What the last attempt reached stays until the new one reports: steps lost are counted from it."""
    forgotten = {"waiting_on": None, "estimated_completion_time": None, "tokens_per_second": None}
    return case.past.progress.model_copy(update={**forgotten, "total_steps": spec.max_steps})


def _removals(case: Case) -> tuple[list[Scale], list[Delete]]:
    scale, statefulset = [], case.statefulset
    if statefulset is not None and not is_ending(statefulset) and replicas(statefulset) != 0:
        scale.append(Scale(case.trainer_ref, 0))
    orphaned = statefulset is None or is_ending(statefulset)
    ends = [p for p in case.group if p.deleted_at is None and (orphaned or p.role == "orchestrator")]
    return scale, [Delete(pod.ref, pod.uid) for pod in ends]


def _failure(case: Case, cause: Cause, *, counted: bool) -> FailureRecord:
    heard = progress.read_lease(case.observed.lease, case.past.attempt)
    step = heard.step if heard is not None and heard.step is not None else case.past.progress.step
    return FailureRecord(
        time=rfc3339(cause.at if cause.at is not None else case.now),
        attempt=case.past.attempt,
        role=cause.role,
        pod_name=cause.pod,
        node_name=cause.node,
        exit_code=cause.exit_code,
        reason=cause.reason,
        message=cause.message,
        counted=counted,
        step=step,
    )
