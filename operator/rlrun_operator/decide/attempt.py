"""Beginning of attempts.

An attempt begins in one pass: children first, then the status, so that a crash between the two leaves children whose label names the
attempt, and the next pass takes it over. Its pods are made only when no trainer or orchestrator pod of another attempt is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlrun.api.kubernetes import Affinity
from rlrun.api.pods import PodFields
from rlrun.api.resource import RLRunSpec
from rlrun.api.status import ProgressStatus, SharedWithStatus
from rlrun.defaults.team import status_of
from rlrun_operator import render
from rlrun_operator.decide import queueing, status_builder
from rlrun_operator.decide.attempt_end import begun, fail, restarting
from rlrun_operator.decide.lifetime import restart_request, rotation_request
from rlrun_operator.decide.objects import keys, parts, unstarted
from rlrun_operator.decide.objects.workload_edits import lost_fields
from rlrun_operator.decide.reading.children import is_ending, rendering_of, uid_of
from rlrun_operator.decide.running import TAKEN_SECONDS, configuration, follow, storage_at_rest, storage_status
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.status_builder import finish
from rlrun_operator.failures import detect
from rlrun_operator.names import Role, attempt_of, key_attempt_of
from rlrun_operator.render import placement
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Apply, Decision, Delete, Manifest
from rlrun_operator.status import failure_reasons, progress, reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.status.conditions import Say, not_failed
from rlrun_operator.times import rfc3339

LOOK_AGAIN_SECONDS = 2.0
"""Delay of the next look where only the cache lags, or objects of others have to go: no event may come."""


def next_attempt(case: Case) -> int:
    """The number of the attempt after all that are known, and after those that the volume knows of."""
    failure, number = case.past.last_failure, case.attempt + 1
    if failure is not None and failure.reason == failure_reasons.NUMBER_TAKEN and failure.attempt == case.past.attempt:
        number = max(number, detect.next_number(failure.message) or 0)
    return number


def launch(case: Case, spec: RLRunSpec, attempt: int) -> Decision:
    """Make what `attempt` needs and does not have yet."""
    if case.forbidden:
        return fail(case, reasons.FORBIDDEN, case.forbidden)
    if conflict := queueing.conflict(case, spec, attempt):
        return fail(case, reasons.FAILED_TO_START, conflict)
    waits = _wait_for_others(case, attempt) or _wait_for_admission(case, attempt)
    if waits is not None:
        return waits
    if (renewal := keys.renewal(case, attempt)) is not None:
        return restarting(case, renewal.message, renewal.reason, renewal.change, AT_ONCE)
    start = _start(case, spec, attempt)
    if (broken := _broken(case, start)) is not None:
        return _begin_again(case, attempt, broken)
    applies = _missing(case, start)
    launched = StatusChange(launched_attempt=attempt) if start.whole else NO_CHANGE
    case = case.begins()
    if start.recorded:
        # The whole pass of the beginning is done, and what is missing is on its way into the cache. Nothing has asked yet what
        # has become of what is there, and its event has come already.
        return follow(case, attempt, launched, Actions(apply=applies, wake_in=LOOK_AGAIN_SECONDS))
    change = launched | _beginning(case, spec, attempt, config_hash=start.context.config.hash())
    if start.whole:
        # All that it needs was made before its workloads. Where admission refuses any of that now, the attempt goes on record
        # all the same: what becomes of it is acted on from then on, and `follow` repairs what it lacks.
        return follow(case, attempt, change, AT_ONCE)
    return _begin(case, spec, start, change, applies)


@dataclass(frozen=True)
class _Start:
    """Workloads of an attempt that begins, or has begun and was not seen whole yet."""

    attempt: int
    recorded: bool
    """True if the status records it."""
    context: render.RunContext
    made: Sequence[Manifest]
    """Workloads as they are rendered now."""
    meant: str | None
    """Mark of the specification that they are to have."""
    there: Mapping[str, Manifest]
    """Workloads that exist, by kind."""

    @property
    def whole(self) -> bool:
        return len(self.there) == len(self.made)


def _start(case: Case, spec: RLRunSpec, attempt: int) -> _Start:
    context = case.context(spec, attempt)
    made = render.workloads(context).made
    recorded = case.past.attempt == attempt
    meant = case.past.spec_hash if recorded else case.spec_hash
    return _Start(attempt, recorded, context, made, meant, _there(case, attempt, meant, None if recorded else made))


def _broken(case: Case, start: _Start) -> str | None:
    """Reason why what exists of an attempt cannot be made whole; None: it can."""
    there, attempt = start.there, start.attempt
    edited = start.meant != case.spec_hash and not start.whole
    if edited or any(case.hash_of(child) != start.meant for child in there.values()):
        return "the specification was edited before all pods existed"
    if any(_has_another_key(case, child, attempt) for child in there.values()):
        return "its workloads were made with two API keys"
    if not (start.whole and start.recorded) and _rendered_otherwise(there, start.made):
        return "another release of the operator had made some of its pods"
    if _is_orphaned(case, start) and "Pod" in there:  # those of another one would work beside these
        return "the StatefulSet was deleted while its pods were being made"
    return None


def _is_orphaned(case: Case, start: _Start) -> bool:
    """True if the attempt has trainer pods and no StatefulSet."""
    trainers = any(pod.role == "trainer" and pod.attempt == start.attempt for pod in case.group)
    return trainers and case.host is None and "StatefulSet" not in start.there


def _missing(case: Case, start: _Start) -> list[Apply]:
    """Writes that make the workloads which do not exist.

    An orchestrator that is not seen may be there all the same: where the StatefulSet of its trainer is gone, it is asked for before the
    attempt is given up.
    """
    missing = [a for a in _applies(case, start.made, start.recorded) if a.manifest["kind"] not in start.there]
    if _is_orphaned(case, start):
        return [a for a in missing if a.manifest["kind"] != "StatefulSet"]
    return missing


def _begin(case: Case, spec: RLRunSpec, start: _Start, change: StatusChange, applies: Sequence[Apply]) -> Decision:
    """Make everything that the attempt lacks, and put it on record."""
    needs = render.prerequisites(start.context)
    create = [child for child in needs.create if not _exists(case, child)]
    makes_key = keys.is_made_now(case)
    if makes_key and not start.there:  # what is there has read the one that was made before it
        create.append(render.api_key_secret(start.context, case.fresh_key))
    untried = not start.there and case.past.spec_hash != case.spec_hash
    actions = Actions(
        create=create,
        apply=[*parts.applies(case, needs.apply), *applies],
        dry_run=_untried(spec, start.made) if untried else (),
    )
    begins = follow(case, start.attempt, change, actions)
    asks = not makes_key and case.attempt < start.attempt
    return replace(begins, ask=keys.secret(case, spec)) if asks else begins


def _beginning(case: Case, spec: RLRunSpec, attempt: int, *, config_hash: str) -> StatusChange:
    """Fields of the status that put `attempt` on record."""
    past, rotation = case.past, rotation_request(case) if not case.attempt else None
    change = StatusChange(
        attempt=attempt,
        start_time=past.start_time or rfc3339(case.now),
        completion_time=None,
        next_retry_time=None,
        max_steps=spec.max_steps,
        restart_requested_at=restart_request(case) or past.restart_requested_at,
        key_attempt=case.key_attempt or None,
        key_rotation_requested_at=rotation or past.key_rotation_requested_at,
        spec_hash=case.spec_hash,
        config_hash=config_hash,
        defaults=status_of(case.observed.defaults, case.applied.taken),
        checkpoint=progress.unresumed(past.checkpoint),
        progress=_progress_of_before(case, spec),
    )
    change |= unstarted.at_beginning(case)
    if case.host is None:
        return change
    return change | StatusChange(shared_with=SharedWithStatus(run=case.host.name, attempt=case.host.attempt))


def _wait_for_others(case: Case, attempt: int) -> Decision | None:
    """Decision while names, claim or host are not free for `attempt`; None: they are, or it needs none of them any more."""
    if not _is_whole(case, attempt):
        if case.taken is not None:
            return _wait_for_name(case, case.taken)
        if case.strangers:
            return _wait_for_strangers(case)
        if case.claim_is_ending and case.attempt < attempt:
            return _free_claim(case)
    return _wait_for_host(case, attempt)


def _wait_for_admission(case: Case, attempt: int) -> Decision | None:
    """Decision while the queue has no room for an attempt that is not on record, or its answer is not.

    A part of the attempt may exist, made before the room was taken back, and seen only now: nothing is added to it.
    """
    say = queueing.awaited(case) if case.past.attempt < attempt else None
    if say is None:
        return None
    actions = AT_ONCE if say.status == "True" else Actions(wake_in=queueing.LOOK_SECONDS)
    if case.past.attempt:
        return restarting(case, f"the next attempt waits in the queue: {say.message}", say.reason, actions=actions)
    return _not_begun(case, reasons.ADMITTED, say, actions.wake_in)


def _is_whole(case: Case, attempt: int) -> bool:
    """True if all workloads of `attempt` exist: it works, on record or not."""
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


def _wait_for_strangers(case: Case) -> Decision:
    shown = ", ".join(case.strangers[:4]) + (", …" if len(case.strangers) > 4 else "")
    message = f"of a deleted run of this name there is still: {shown}; this run begins when they are gone"
    say = Say("False", reasons.PREVIOUS_RUN_ENDING, message)
    return _not_begun(case, reasons.SCHEDULED, say, LOOK_AGAIN_SECONDS)


def _free_claim(case: Case) -> Decision:
    """Remove what outlives attempts and holds a claim that is being deleted: it would neither go nor take another pod."""
    engines = [Delete(ref, uid_of(child)) for ref, child in case.engine_deployments if not is_ending(child)]
    message = (
        f"claim {case.wanted.claim} is being deleted, and goes when no pod uses it; the next attempt begins then, on a new "
        "claim: from the model, where nothing else has the checkpoints"
    )
    actions = Actions(delete=engines, wake_in=LOOK_AGAIN_SECONDS)
    return restarting(case, message, reasons.CLAIM_DELETED, actions=actions)


def _wait_for_name(case: Case, taken: str) -> Decision:
    message = (
        f"{taken} exists and is not of this run, which needs the name and leaves the object alone; delete or rename it, "
        "or give the run another name"
    )
    if case.past.attempt:
        return restarting(case, message, reasons.NAME_TAKEN, actions=Actions(wake_in=TAKEN_SECONDS))
    return _not_begun(case, reasons.SCHEDULED, Say("False", reasons.NAME_TAKEN, message), TAKEN_SECONDS)


def _not_begun(
    case: Case, kind: str, say: Say, wake_in: float | None = None, change: StatusChange = NO_CHANGE
) -> Decision:
    """Decision not to begin the first attempt yet; `say`: the condition `kind`, which has the reason."""
    said = {kind: say, **storage_at_rest(case), reasons.CONFIGURATION_VALID: configuration(case, pending=False)}
    change |= StatusChange(
        completion_time=None,
        storage=storage_status(case),
        progress=progress.changed(case.past.progress, total_steps=case.total_steps),
    )
    return finish(case, said | not_failed(case.past.conditions), change, Actions(wake_in=wake_in))


def _wait_for_host(case: Case, attempt: int) -> Decision | None:
    """Decision on a guest that its host cannot take; None: it can, or `attempt` has begun and `decide` sees to it."""
    say = case.host_available
    if say is None or say.status == "True" or (case.orchestrator(attempt) is not None and case.host is not None):
        return None
    if case.attempt:
        on_record = case.past.attempt == attempt
        message = f"the next attempt waits for the host: {say.message}"
        change = StatusChange(attempt=case.attempt, launched_attempt=case.attempt)
        return restarting(case, message, say.reason, change, AT_ONCE if on_record else NO_ACTIONS)
    change = StatusChange(shared_with=status_builder.shared_with(case))
    return _not_begun(case, reasons.HOST_AVAILABLE, say, change=change)


def _begin_again(case: Case, attempt: int, what: str) -> Decision:
    """End an attempt unseen, as something came between two of its children; its successor is made whole."""
    change = StatusChange(attempt=attempt, launched_attempt=attempt)
    if attempt != case.past.attempt:
        change |= StatusChange(checkpoint=begun(case).checkpoint)
    return restarting(case, f"attempt {attempt} is made again: {what}", reasons.PODS_ENDING, change, AT_ONCE)


def _has_another_key(case: Case, child: Manifest, attempt: int) -> bool:
    """True if one of the attempt's workloads was made with another API key than the run has: two operators have asked for its Secret, one
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
        now = [child for child in made or () if child["kind"] == "Deployment"]
        kept = case.hash_of(deployment) == meant and (
            made is None or any(_is_as_made(deployment, child) for child in now)
        )
        if kept or attempt_of(deployment["metadata"]) == attempt:
            result["Deployment"] = deployment
    orchestrator = case.orchestrator(attempt)
    if orchestrator is not None:
        result["Pod"] = orchestrator.manifest
    return result


def _is_as_made(deployment: Manifest, made: Manifest) -> bool:
    """True if engines need not be made again: they were rendered no otherwise than now, and nobody has edited them."""
    return rendering_of(deployment) == rendering_of(made) and not lost_fields(deployment, made)


def _rendered_otherwise(there: Mapping[str, Manifest], made: Sequence[Manifest]) -> bool:
    """True if a workload that exists does not go with those that would be made beside it. A pod is made last, and has no mark."""
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


def _progress_of_before(case: Case, spec: RLRunSpec) -> ProgressStatus:
    """Progress of the last attempt, which stays until the new one reports: steps lost are counted from it."""
    total = spec.max_steps if case.trains else case.past.progress.total_steps
    return progress.changed(
        case.past.progress,
        waiting_on=None,
        estimated_completion_time=None,
        tokens_per_second=None,
        total_steps=total,
    )
