"""Begin and end of attempts.

An attempt ends in two passes: the cause is on record before anything is removed, because removing the pods destroys the evidence. It
begins in one: children first, then the status, so that a crash between the two leaves children whose label names the attempt, and the
next pass takes it over. Its pods are made only when no trainer or orchestrator pod of another attempt is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlrun.api.kubernetes import Affinity
from rlrun.api.life import NodeLossSpec
from rlrun.api.pods import PodFields
from rlrun.api.resource import RLRunSpec
from rlrun.api.status import ExcludedNode, FailureRecord, RLRunStatus, SharedWithStatus
from rlrun_operator import render
from rlrun_operator.decide import hindsight, keys, parts, status_builder
from rlrun_operator.decide.lifetime import restart_request, rotation_request
from rlrun_operator.decide.running import (
    TAKEN_SECONDS,
    configuration,
    finish,
    follow,
    of_inference,
    storage_at_rest,
    storage_status,
)
from rlrun_operator.decide.snapshot import Case, has_let_go, is_ending, rendering_of, replicas, uid_of
from rlrun_operator.failures import detect, node_exclusion, node_loss, policy
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import Role, attempt_of, key_attempt_of
from rlrun_operator.pods import Pod
from rlrun_operator.render import placement
from rlrun_operator.state import Apply, Decision, Delete, Fact, Manifest, Scale
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.conditions import Say, find, is_true, not_failed, since
from rlrun_operator.times import rfc3339, seconds_of

FAILURES_KEPT = 5
"""Of `status.failures`."""
HELD_GRACE_SECONDS = 1
"""For a trainer pod whose process has ended. Its container was started again to hold still; the signal to end may come before that one
can hear it, and the first process of a container that does not hear it lives on to the end of the grace period."""
SETTLE_SECONDS = 3.0
"""The cache is believed that a StatefulSet that is gone has left no pod so long after its end was wanted: what it made just before may
still be on its way. Mostly there is something to wait for that takes longer."""
LOOK_AGAIN_SECONDS = 2.0
"""Where only the cache lags, or objects of others have to go: no event may come."""


def next_attempt(case: Case) -> int:
    """The number of the attempt after all that are known, and after those that the volume knows of."""
    failure, number = case.past.last_failure, case.attempt + 1
    if failure is not None and failure.reason == reasons.NUMBER_TAKEN and failure.attempt == case.past.attempt:
        number = max(number, detect.next_number(failure.message) or 0)
    return number


def launch(case: Case, spec: RLRunSpec, attempt: int) -> Decision:
    """Make what `attempt` needs and does not have yet."""
    if case.forbidden:
        return fail(case, reasons.FORBIDDEN, case.forbidden)
    waits = _wait_for_others(case, attempt)
    if waits is not None:
        return waits
    if (renewal := keys.renewal(case, attempt)) is not None:
        return restarting(case, renewal.message, renewal.reason, wake_in=0.0, **renewal.updates)
    context = case.context(spec, attempt)
    made = render.workloads(context).made
    recorded = case.past.attempt == attempt
    meant = case.past.spec_hash if recorded else case.spec_hash
    there = _there(case, attempt, meant, None if recorded else made)
    whole = len(there) == len(made)
    if any(case.hash_of(child) != meant for child in there.values()) or (meant != case.spec_hash and not whole):
        return _begin_again(case, attempt, "the specification was edited before all pods existed")
    if any(_has_another_key(case, child, attempt) for child in there.values()):
        return _begin_again(case, attempt, "its workloads were made with two API keys")
    if not (whole and recorded) and _rendered_otherwise(there, made):
        return _begin_again(case, attempt, "another release of the operator had made some of its pods")
    trainers = [pod for pod in case.group if pod.role == "trainer" and pod.attempt == attempt]
    orphaned = bool(trainers) and case.host is None and "StatefulSet" not in there
    if orphaned and "Pod" in there:  # those of another one would work beside these
        return _begin_again(case, attempt, "the StatefulSet was deleted while its pods were being made")
    missing = [a for a in _applies(case, made, recorded) if a.manifest["kind"] not in there]
    # An orchestrator that is not seen may be there all the same: it is asked for before the attempt is given up.
    applies = [a for a in missing if not (orphaned and a.manifest["kind"] == "StatefulSet")]
    updates: dict[str, Any] = {}
    if whole:
        updates["launched_attempt"] = attempt
    case = replace(case, beginning=True)
    if recorded:
        # The whole pass of the beginning is done, and what is missing is on its way into the cache. Nor has anybody asked yet what
        # has become of what is there, and its event has come already.
        return follow(case, attempt, updates=updates, apply=applies, wake_in=LOOK_AGAIN_SECONDS)
    updates |= _beginning(case, spec, attempt, config_hash=context.config.hash())
    if whole:
        # All that it needs was made before its workloads. Where admission refuses any of that now, the attempt goes on record
        # all the same: what becomes of it is acted on from then on, and `follow` repairs what it lacks.
        return follow(case, attempt, updates=updates, wake_in=0.0)
    needs = render.prerequisites(context)
    create = [child for child in needs.create if not _exists(case, child)]
    makes_key = keys.is_made_now(case)
    if makes_key and not there:  # what is there has read the one that was made before it
        create.append(render.api_key_secret(context, case.fresh_key))
    begins = follow(
        case,
        attempt,
        updates=updates,
        create=create,
        apply=[*parts.applies(case, needs.apply), *applies],
        dry_run=_untried(spec, made) if not there and case.past.spec_hash != case.spec_hash else (),
    )
    asks = not makes_key and case.attempt < attempt
    return replace(begins, ask=keys.secret(case, spec)) if asks else begins


def _beginning(case: Case, spec: RLRunSpec, attempt: int, *, config_hash: str) -> dict[str, Any]:
    """Fields of the status that put `attempt` on record."""
    fields: dict[str, Any] = {
        "attempt": attempt,
        "start_time": case.past.start_time or rfc3339(case.now),
        "completion_time": None,
        "next_retry_time": None,
        "max_steps": spec.max_steps,
        "restart_requested_at": restart_request(case) or case.past.restart_requested_at,
        "key_attempt": case.key_attempt or None,
        "key_rotation_requested_at": (rotation_request(case) if not case.attempt else None)
        or case.past.key_rotation_requested_at,
        "spec_hash": case.spec_hash,
        "config_hash": config_hash,
        "checkpoint": case.past.checkpoint.model_copy(update={"resumed_from_step": None}),
        "progress": _progress_of_before(case, spec),
    }
    if case.host is not None:
        fields["shared_with"] = SharedWithStatus(run=case.host.name, attempt=case.host.attempt)
    return fields


def _wait_for_others(case: Case, attempt: int) -> Decision | None:
    """What is done while names, claim or host are not free for `attempt`; None: they are, or it needs none of them any more."""
    if not _is_whole(case, attempt):
        if case.taken is not None:
            return _wait_for_name(case, case.taken)
        if case.strangers:
            return _wait_for_strangers(case)
        if case.claim_is_ending and case.attempt < attempt:
            return _free_claim(case)
    return _wait_for_host(case, attempt)


def _is_whole(case: Case, attempt: int) -> bool:
    """Whether all workloads of `attempt` exist: it works, whether it is on record or not."""
    trainer = case.statefulset
    trains = trainer is not None and attempt_of(trainer["metadata"]) == attempt
    served = case.deployment is not None or not case.serves
    own = case.trains and case.host_name is None
    return case.orchestrator(attempt) is not None and (trains or not own) and served


def _untried(spec: RLRunSpec, made: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Workloads that hold what only the API server can judge."""
    roles: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
    return tuple(child for child in made if _is_unjudged(placement.block(spec, roles[child["kind"]])))


def _is_unjudged(block: PodFields) -> bool:
    extended = any("/" in name for name in (*block.resources.limits, *block.resources.requests))
    return bool(block.pod_template) or block.affinity != Affinity() or extended


def record(case: Case, cause: Cause) -> Decision:
    """Put on record why the current attempt ends, and what follows; the next pass acts."""
    if case.spec is None:
        told = f"attempt {case.past.attempt} ended ({detect.told_of(cause)}), and the specification is invalid: {case.problems}"
        return fail(case, reasons.INVALID_CONFIGURATION, told, _failure(case, cause, counted=False))
    past, policy_spec = case.past, case.spec.failure_policy
    heard = progress.read_lease(case.observed.lease, past.attempt)
    reached = progress.progressed(past, heard, case.total_steps, case.now)
    budget = policy.budget_of(past, reached, policy_spec)
    what = policy.verdict(cause, budget=budget, policy=policy_spec, random=case.random)
    if what.rule is not None:
        cause = replace(cause, message=f"{what.rule}: {cause.message}")
    failure = _failure(case, cause, counted=what.counted)
    if what.fails is not None:
        return fail(case, *what.fails, failure)
    retry = rfc3339(math.ceil(case.now + what.wait_seconds)) if what.wait_seconds else None
    return restarting(
        case,
        f"attempt {past.attempt} ended: {detect.told_of(cause)}",
        reasons.PODS_ENDING,
        wake_in=0.0,
        last_failure=failure,
        failures=[*past.failures, failure][-FAILURES_KEPT:],
        restarts=past.restarts + 1,
        restarts_counted_towards_max=budget.counted + what.counted,
        counted_at_step=reached.furthest_step if what.counted else past.counted_at_step,
        restarts_without_step=budget.without_step + 1,
        excluded_nodes=_excluded(case, case.spec, failure) or None,
        next_retry_time=retry,
    )


def _excluded(case: Case, spec: RLRunSpec, failure: FailureRecord) -> list[ExcludedNode]:
    """A guest has no node of its own to leave, and a volume of one node holds its run there."""
    movable = case.host_name is None and not placement.one_node(spec)
    nodes = [pod.node for pod in case.pods if pod.node is not None]
    return node_exclusion.after(case.past, failure, nodes, movable=movable, now=case.now)


def ends_run(case: Case, cause: Cause, spec: RLRunSpec) -> bool:
    """Whether the failure policy would fail the run for `cause`."""
    budget = policy.budget_of(case.past, case.past.progress, spec.failure_policy)
    what = policy.verdict(cause, budget=budget, policy=spec.failure_policy, random=case.random)
    return what.fails is not None


def give_up(case: Case, cause: Cause) -> Decision:
    """End a hanging run for good, because its specification asks for it."""
    return fail(case, cause.reason, detect.told_of(cause), _failure(case, cause, counted=False))


def fail(
    case: Case, reason: str, message: str, failure: FailureRecord | None = None, *, corrects: bool = False
) -> Decision:
    """End the run for good; the next pass frees its GPUs.

    Args:
        failure: to put on record.
        corrects: whether it takes the place of the last one.
    """
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
        before = past.failures[:-1] if corrects else past.failures
        updates |= {"last_failure": failure, "failures": [*before, failure][-FAILURES_KEPT:]}
    new = status_builder.status(case, said, updates, training=False)
    return finish(case, new, wake_in=0.0)


def restart(case: Case) -> Decision:
    """Remove the ended attempt's pods; once they are gone and the backoff is over, begin the next attempt."""
    if (late := _ended_for_good(case)) is not None:
        return late
    scale, delete = removals(case)
    left = sorted(pod.name for pod in case.group)
    past, retry_at = case.past, seconds_of(case.past.next_retry_time)
    ended = past.last_failure
    because = f"attempt {past.attempt} ended"
    if ended is not None and ended.attempt == past.attempt:
        code = "" if ended.exit_code is None else f" (exit code {ended.exit_code})"
        because += f": {ended.role} pod {ended.pod_name}{code}: {ended.message}"
    elif is_true(past.conditions, reasons.RESTARTING):  # nothing failed: what was said first says why
        said = find(past.conditions, reasons.RESTARTING)
        because = said.message.partition("; ")[0] if said is not None else because
    if left or not has_let_go(case.statefulset):
        pods = f" ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ""
        stuck = overdue(case)
        corrected = hindsight.corrections(case, stuck.silent)
        told = f": {stuck.told}" if stuck.told else pods
        return restarting(
            case,
            f"{because}; waiting for its pods to be gone{told}",
            reasons.PODS_ENDING,
            scale=scale,
            delete=[*delete, *stuck.force],
            wake_in=stuck.look_in,
            look_up=frozenset(("nodes",)) if stuck.nodes_would_help else frozenset(),
            **corrected,
        )
    failed = ended is not None and ended.attempt == past.attempt  # else the operator has removed everything long ago
    if failed and (settles := settles_in(case, reasons.RESTARTING)) > 0:
        return restarting(case, f"{because}; no pod is seen any more", reasons.PODS_ENDING, wake_in=settles)
    longest = policy.longest_backoff(case.spec.failure_policy.backoff) if case.spec is not None else math.inf
    if (
        retry_at is not None and case.now < retry_at <= case.now + longest
    ):  # later than that: somebody has set the clock
        message = f"{because}; the next attempt begins at {past.next_retry_time}"
        return restarting(case, message, reasons.BACK_OFF, wake_in=retry_at - case.now)
    if case.spec is None:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    return launch(case, case.spec, next_attempt(case))


def _ended_for_good(case: Case) -> Decision | None:
    """The end of the run, where Kubernetes told of a peer's failure before it told of the one that no restart can mend."""
    cause = hindsight.ends_for_good(case)
    if cause is None or case.spec is None:
        return None
    budget = policy.budget_of(case.past, case.past.progress, case.spec.failure_policy)
    what = policy.verdict(cause, budget=budget, policy=case.spec.failure_policy, random=case.random)
    if what.fails is None:
        return None
    return fail(case, *what.fails, _failure(case, cause, counted=False), corrects=True)


def settles_in(case: Case, kind: str) -> float:
    """Seconds until the cache is believed that there is no trainer.

    Args:
        kind: of the condition that says since when there shall be none: Restarting, or Suspended.
    """
    began = since(case.past.conditions, kind, true=kind == reasons.RESTARTING)
    if not case.past.attempt or began is None or case.statefulset is not None or case.host_name is not None:
        return 0.0
    if not case.trains or began - case.now > SETTLE_SECONDS:  # somebody has set the clock back
        return 0.0
    return began + SETTLE_SECONDS - case.now


def overdue(case: Case, *, suspending: bool = False) -> node_loss.Overdue:
    """Of the pods that have to be gone before the next attempt, or on the way into suspension, those that do not end."""
    kind = reasons.SUSPENDED if suspending else reasons.RESTARTING
    asked = since(case.past.conditions, kind, true=not suspending)
    limit = case.spec.node_loss if case.spec is not None else NodeLossSpec()
    seconds = float(limit.force_delete_seconds)
    pods = case.pods if suspending else case.group
    return node_loss.overdue(pods, case.observed.nodes, since=asked, after=seconds, now=case.now)


def run_over(case: Case, message: str) -> dict[str, Say]:
    """Conditions of a run that has ended."""
    engines = (reasons.INFERENCE_AVAILABLE,) if case.serves else ()
    host = (reasons.HOST_AVAILABLE,) if case.host_name is not None else ()
    kinds = (reasons.PODS_READY, *engines, *host, reasons.PROGRESSING)
    return {kind: Say("False", reasons.RUN_OVER, message) for kind in kinds}


def restarting(
    case: Case,
    message: str,
    reason: str,
    *,
    scale: list[Scale] | None = None,
    delete: list[Delete] | None = None,
    wake_in: float | None = None,
    look_up: frozenset[Fact] = frozenset(),
    **updates: Any,
) -> Decision:
    """Say that the run restarts, and why; `updates`: more fields of the status."""
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
    said |= not_failed(case.past.conditions)
    fields: dict[str, Any] = {
        **status_builder.roles(case, attempt, heard),
        "attempt": attempt,
        "completion_time": None,
        "progress": progress.progressed(case.past, heard, case.total_steps, case.now),
        "checkpoint": progress.checkpointed(case.past, heard, case.now),
        **updates,
    }
    new = status_builder.status(case, said, fields, training=False)
    return finish(case, new, scale=scale or (), delete=delete or (), wake_in=wake_in, look_up=look_up)


def _wait_for_strangers(case: Case) -> Decision:
    shown = ", ".join(case.strangers[:4]) + (", …" if len(case.strangers) > 4 else "")
    message = f"of a deleted run of this name there is still: {shown}; this run begins when they are gone"
    return _not_begun(case, Say("False", reasons.PREVIOUS_RUN_ENDING, message), LOOK_AGAIN_SECONDS)


def _free_claim(case: Case) -> Decision:
    """Remove what outlives attempts and holds a claim that is being deleted: it would neither go nor take another pod."""
    held = case.deployment is not None and not is_ending(case.deployment)
    engines = [Delete(case.inference_ref, uid_of(case.deployment))] if held and case.deployment is not None else []
    message = (
        f"claim {case.wanted.claim} is being deleted, and goes when no pod uses it; the next attempt begins then, on a new "
        "claim: from the model, where nothing else has the checkpoints"
    )
    return restarting(case, message, reasons.CLAIM_DELETED, delete=engines, wake_in=LOOK_AGAIN_SECONDS)


def _wait_for_name(case: Case, taken: str) -> Decision:
    message = (
        f"{taken} exists and is not of this run, which needs the name and leaves the object alone; delete or rename it, "
        "or give the run another name"
    )
    if case.past.attempt:
        return restarting(case, message, reasons.NAME_TAKEN, wake_in=TAKEN_SECONDS)
    return _not_begun(case, Say("False", reasons.NAME_TAKEN, message), TAKEN_SECONDS)


def _not_begun(case: Case, say: Say, wake_in: float) -> Decision:
    """Why the first attempt does not begin yet."""
    said = {
        reasons.SCHEDULED: say,
        **storage_at_rest(case),
        reasons.CONFIGURATION_VALID: configuration(case, pending=False),
        **not_failed(case.past.conditions),
    }
    updates = {
        "completion_time": None,
        "storage": storage_status(case),
        "progress": case.past.progress.model_copy(update={"total_steps": case.total_steps}),
    }
    return finish(case, status_builder.status(case, said, updates, training=False), wake_in=wake_in)


def _wait_for_host(case: Case, attempt: int) -> Decision | None:
    """What a guest does that its host cannot take; None: it can, or `attempt` has begun and `decide` sees to it."""
    say = case.host_available
    if say is None or say.status == "True" or (case.orchestrator(attempt) is not None and case.host is not None):
        return None
    if case.attempt:
        begun = case.past.attempt == attempt
        return restarting(
            case,
            f"the next attempt waits for the host: {say.message}",
            say.reason,
            wake_in=0.0 if begun else None,
            attempt=case.attempt,
            launched_attempt=case.attempt,
        )
    said = {
        reasons.HOST_AVAILABLE: say,
        reasons.CONFIGURATION_VALID: configuration(case, pending=False),
        **not_failed(case.past.conditions),
    }
    updates = {
        "completion_time": None,
        "storage": storage_status(case),
        "progress": case.past.progress.model_copy(update={"total_steps": case.total_steps}),
        "shared_with": status_builder.shared_with(case),
    }
    return finish(case, status_builder.status(case, said, updates, training=False))


def _begin_again(case: Case, attempt: int, what: str) -> Decision:
    """Something came between two children of one attempt: it ends unseen, and its successor is made whole."""
    updates: dict[str, Any] = {} if attempt == case.past.attempt else {"checkpoint": begun(case).checkpoint}
    return restarting(
        case,
        f"attempt {attempt} is made again: {what}",
        reasons.PODS_ENDING,
        wake_in=0.0,
        attempt=attempt,
        launched_attempt=attempt,
        **updates,
    )


def begun(case: Case) -> RLRunStatus:
    """The status before, without where the attempt before began, should the newest one's beginning not be on record."""
    if case.attempt == case.past.attempt:
        return case.past
    checkpoint = case.past.checkpoint.model_copy(update={"resumed_from_step": None})
    return case.past.model_copy(update={"checkpoint": checkpoint})


def _has_another_key(case: Case, child: Manifest, attempt: int) -> bool:
    """Whether one of the attempt's workloads was made with another API key than the run has: two operators have asked for its Secret, one
    of them before it was lost. A workload of an earlier attempt is still to be renewed.
    """
    return attempt_of(child["metadata"]) == attempt and key_attempt_of(child["metadata"]) != case.key_attempt


def _there(case: Case, attempt: int, meant: str | None, made: Sequence[Manifest] | None) -> dict[str, Manifest]:
    """The attempt's workloads that exist, by kind.

    Engines outlive attempts: theirs is there if it has the specification that is meant and, where an attempt begins, is rendered no
    otherwise than now. `made`: how the beginning attempt is rendered; None: it has begun, and what runs is touched by no other release.
    """
    result: dict[str, Manifest] = {}
    if case.statefulset is not None and attempt_of(case.statefulset["metadata"]) == attempt:
        result["StatefulSet"] = case.statefulset
    deployment = case.deployment
    if deployment is not None:
        now = {rendering_of(child) for child in made or () if child["kind"] == "Deployment"}
        kept = case.hash_of(deployment) == meant and (made is None or rendering_of(deployment) in now)
        if kept or attempt_of(deployment["metadata"]) == attempt:
            result["Deployment"] = deployment
    orchestrator = case.orchestrator(attempt)
    if orchestrator is not None:
        result["Pod"] = orchestrator.manifest
    return result


def _rendered_otherwise(there: Mapping[str, Manifest], made: Sequence[Manifest]) -> bool:
    """Whether a workload that exists does not go with those that would be made beside it. A pod is made last, and has no mark."""
    now = {child["kind"]: rendering_of(child) for child in made}
    return any(rendering_of(child) != now.get(kind) for kind, child in there.items())


def _applies(case: Case, made: Sequence[Manifest], recorded: bool) -> list[Apply]:
    """Workloads in the order of their making. A cached one of an older attempt is not made again once the beginning is on record."""
    older = {"StatefulSet": case.statefulset, "Deployment": case.deployment, "Pod": None}
    kept = [child for child in made if older[child["kind"]] is None or not recorded]
    return [_over(child, older[child["kind"]]) for child in kept]


def _over(child: Manifest, older: Manifest | None) -> Apply:
    version = None if older is None else older["metadata"].get("resourceVersion")
    return Apply(child, expect_absent=older is None, replaces=version)


def _exists(case: Case, child: Manifest) -> bool:
    if child["kind"] == "Lease":
        return case.observed.lease is not None
    return case.claim is not None


def _progress_of_before(case: Case, spec: RLRunSpec) -> Any:
    """What the last attempt reached stays until the new one reports: steps lost are counted from it."""
    forgotten = {"waiting_on": None, "estimated_completion_time": None, "tokens_per_second": None}
    total = spec.max_steps if case.trains else case.past.progress.total_steps
    return case.past.progress.model_copy(update={**forgotten, "total_steps": total})


def removals(case: Case) -> tuple[list[Scale], list[Delete]]:
    """Writes that ask the attempt's pods, all together, to save and end."""
    scale, statefulset = [], case.statefulset
    if statefulset is not None and not is_ending(statefulset) and replicas(statefulset) != 0:
        scale.append(Scale(case.trainer_ref, uid_of(statefulset), 0))
    orphaned = statefulset is None or is_ending(statefulset)
    ends = [p for p in case.group if p.deleted_at is None and (orphaned or p.role == "orchestrator")]
    return scale, [*(Delete(pod.ref, pod.uid) for pod in ends), *hurried(case)]


def hurried(case: Case) -> list[Delete]:
    """Shorten the grace period of trainer pods that were asked to end and whose process has ended: they have nothing left to save."""
    held = [pod for pod in case.group if pod.role == "trainer" and pod.exit is not None and _lingers(pod)]
    return [Delete(pod.ref, pod.uid, grace_seconds=HELD_GRACE_SECONDS) for pod in held]


def _lingers(pod: Pod) -> bool:
    """Whether it was given more time to end than what holds there needs."""
    return int(pod.manifest["metadata"].get("deletionGracePeriodSeconds") or 0) > HELD_GRACE_SECONDS


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
