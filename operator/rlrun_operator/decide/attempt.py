"""Start of attempts.

An attempt starts in one pass: children first, then the status. After a crash between the two, the labels of the children name the attempt,
and the next pass adopts it. Its pods are created only if no trainer or orchestrator pod of another attempt is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlrun.api.kubernetes_types import Affinity
from rlrun.api.pod_fields import PodFields
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import ProgressStatus, SharedWithStatus
from rlrun.defaults.team_defaults import status_of
from rlrun_operator import render
from rlrun_operator.decide import api_keys, queueing, repairs, status_builder, workload_edits
from rlrun_operator.decide.attempt_end import fail_run, report_restart, status_before_attempt
from rlrun_operator.decide.lifetime import restart_request, rotation_request
from rlrun_operator.decide.reading import is_ending, rendering_of, uid_of
from rlrun_operator.decide.running import (
    TAKEN_SECONDS,
    configuration_condition,
    follow_attempt,
    storage_at_rest,
    storage_status,
)
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.status_builder import finish_decision
from rlrun_operator.decide.workload_edits import lost_fields
from rlrun_operator.failures import detect
from rlrun_operator.names import Role, attempt_of, key_attempt_of
from rlrun_operator.render import pod_placement
from rlrun_operator.state import AT_ONCE, NO_ACTIONS, Actions, Apply, Create, Decision, Delete, DryRun, Manifest, Write
from rlrun_operator.status import failure_reasons, reasons, run_progress
from rlrun_operator.status.conditions import NO_CHANGE, ConditionUpdate, StatusChange, not_failed
from rlrun_operator.times import format_rfc3339

LOOK_AGAIN_SECONDS = 2.0
"""Delay of the next pass if the cache lags or foreign objects have to disappear: there may be no event for either."""


def next_attempt(run: RunSnapshot) -> int:
    """Return the number of the next attempt: above all observed attempts, and above those on the volume."""
    failure, number = run.past.last_failure, run.attempt + 1
    if failure is not None and failure.reason == failure_reasons.NUMBER_TAKEN and failure.attempt == run.past.attempt:
        number = max(number, detect.next_number(failure.message) or 0)
    return number


def launch_attempt(run: RunSnapshot, spec: RLRunSpec, attempt: int) -> Decision:
    """Create the objects that `attempt` needs and that do not exist yet."""
    # What no wait can repair fails the run first, so that it does not wait for a name or a turn in vain.
    if run.forbidden_fields:
        return fail_run(run, reasons.FORBIDDEN, run.forbidden_fields)
    if conflict := queueing.explain_conflict(run, spec, attempt):
        return fail_run(run, reasons.FAILED_TO_START, conflict)
    # Names, the claim and the host come before the queue: from its recorded admission on the run holds
    # resources, which must not be idle while it waits for something else.
    waits = _wait_for_others(run, attempt) or _wait_for_admission(run, attempt)
    if waits is not None:
        return waits
    # A new key is recorded in a pass of its own, before an object uses it: after a crash the next pass must
    # know which key the existing objects have.
    if (renewal := api_keys.renew_key(run, attempt)) is not None:
        return report_restart(run, renewal.message, renewal.reason, renewal.change, AT_ONCE)
    # An interrupted start is completed only with what its existing objects were made of: workloads of two
    # specifications, keys or releases do not work together (decision 52). Otherwise the next attempt replaces
    # it.
    start = _read_start(run, spec, attempt)
    if (broken := _explain_unrepairable(run, start)) is not None:
        return _begin_again(run, attempt, broken)
    applies = _create_missing_workloads(run, start)
    launched = StatusChange(launched_attempt=attempt) if start.is_complete else NO_CHANGE
    # From here on the snapshot describes the attempt that starts: an edited specification determines its
    # numbers of pods. Before, these are the numbers of the attempt that ended.
    run = run.for_new_attempt()
    if start.recorded:
        # The first pass of this attempt is complete; missing objects are on their way into the cache. The existing ones were not
        # judged yet, and their events have arrived already, so this pass follows the attempt.
        return follow_attempt(run, attempt, launched, Actions(writes=applies, wake_in=LOOK_AGAIN_SECONDS))
    change = launched | _record_beginning(run, spec, attempt, config_hash=start.context.config.config_hash())
    if start.is_complete:
        # Its other objects were created before its workloads. Even if admission refuses one of them now, the attempt is recorded:
        # from then on its pods are followed, and `follow_attempt` repairs the missing objects.
        return follow_attempt(run, attempt, change, AT_ONCE)
    return _begin_attempt(run, spec, start, change, applies)


@dataclass(frozen=True)
class _Start:
    """Workloads of an attempt that starts, or that started and was not observed completely yet."""

    attempt: int
    recorded: bool
    """Whether the status records the attempt."""
    context: render.RunContext
    rendered: Sequence[Manifest]
    """Workloads, rendered from the current specification."""
    expected_hash: str | None
    """Hash of the specification that the workloads must have."""
    existing: Mapping[str, Manifest]
    """Existing workloads, by kind."""

    @property
    def is_complete(self) -> bool:
        return len(self.existing) == len(self.rendered)


def _read_start(run: RunSnapshot, spec: RLRunSpec, attempt: int) -> _Start:
    context = run.context(spec, attempt)
    made = render.render_workloads(context).existing
    recorded = run.past.attempt == attempt
    meant = run.past.spec_hash if recorded else run.spec_hash
    return _Start(
        attempt, recorded, context, made, meant, _existing_workloads(run, attempt, meant, None if recorded else made)
    )


def _explain_unrepairable(run: RunSnapshot, start: _Start) -> str | None:
    """Return why an incomplete attempt cannot be completed, or None if it can."""
    there, attempt = start.existing, start.attempt
    edited = start.expected_hash != run.spec_hash and not start.is_complete
    if edited or any(run.hash_of(child) != start.expected_hash for child in there.values()):
        return "the specification was edited before all pods existed"
    if any(_has_another_key(run, child, attempt) for child in there.values()):
        return "its workloads were made with two API keys"
    if not (start.is_complete and start.recorded) and _rendered_otherwise(there, start.rendered):
        return "another release of the operator had made some of its pods"
    if _is_orphaned(run, start) and "Pod" in there:  # pods of a second StatefulSet would run next to these
        return "the StatefulSet was deleted while its pods were being made"
    return None


def _is_orphaned(run: RunSnapshot, start: _Start) -> bool:
    """Return whether the attempt has trainer pods without a StatefulSet."""
    trainers = any(pod.role == "trainer" and pod.attempt == start.attempt for pod in run.group)
    return trainers and run.host is None and "StatefulSet" not in start.existing


def _create_missing_workloads(run: RunSnapshot, start: _Start) -> list[Apply]:
    """Return the writes that create missing workloads.

    The cache may lack an orchestrator that exists. If the trainer's StatefulSet is gone, the orchestrator is applied before the attempt is
    given up: the API server then reports whether it exists.
    """
    missing = [
        a for a in _apply_workloads(run, start.rendered, start.recorded) if a.manifest["kind"] not in start.existing
    ]
    if _is_orphaned(run, start):
        return [a for a in missing if a.manifest["kind"] != "StatefulSet"]
    return missing


def _begin_attempt(
    run: RunSnapshot, spec: RLRunSpec, start: _Start, change: StatusChange, applies: Sequence[Apply]
) -> Decision:
    """Create all missing objects of the attempt, and record it in the status."""
    # Objects that pods mount or read are created first. Existing ones are left alone: the claim and the Lease
    # contain data of earlier attempts.
    needs = render.render_prerequisites(start.context)
    create = [Create(child) for child in needs.create if not _workload_exists(run, child)]
    makes_key = api_keys.is_made_now(run)
    if makes_key and not start.existing:  # existing workloads have read the key that was created before them
        create.append(Create(render.api_key_secret(start.context, run.fresh_key)))
    # A specification that no attempt has used is tried by dry runs, because only the API server can judge pod
    # templates. Its refusal then precedes the first object.
    untried = not start.existing and run.past.spec_hash != run.spec_hash
    checks = [api_keys.check_secret(run, spec)] if not makes_key and run.attempt < start.attempt else []
    dry_runs = _untried_workloads(spec, start.rendered) if untried else []
    # Checks change nothing, so they come first: a refused one leaves nothing behind. Workloads come last, so
    # that no GPU waits for a missing object.
    writes: list[Write] = [*checks, *dry_runs, *create, *repairs.apply_parts(run, needs.apply), *applies]
    return follow_attempt(run, start.attempt, change, Actions(writes=writes))


def _record_beginning(run: RunSnapshot, spec: RLRunSpec, attempt: int, *, config_hash: str) -> StatusChange:
    """Return the status fields that record the start of `attempt`."""
    past, rotation = run.past, rotation_request(run) if not run.attempt else None
    change = StatusChange(
        attempt=attempt,
        start_time=past.start_time or format_rfc3339(run.now),
        completion_time=None,
        next_retry_time=None,
        max_steps=spec.max_steps,
        restart_requested_at=restart_request(run) or past.restart_requested_at,
        key_attempt=run.key_attempt or None,
        key_rotation_requested_at=rotation or past.key_rotation_requested_at,
        spec_hash=run.spec_hash,
        config_hash=config_hash,
        defaults=status_of(run.observed.defaults, run.applied.taken),
        checkpoint=run_progress.unresumed_checkpoint(past.checkpoint),
        progress=_progress_of_before(run, spec),
    )
    change |= workload_edits.at_beginning(run)
    if run.host is None:
        return change
    return change | StatusChange(shared_with=SharedWithStatus(run=run.host.name, attempt=run.host.attempt))


def _wait_for_others(run: RunSnapshot, attempt: int) -> Decision | None:
    """Return the decision while a name, the claim or the host is not free for `attempt`; None if nothing has to be waited for."""
    # An attempt whose workloads all exist works already. A foreign object or an ending claim does not stop
    # it.
    if not _is_whole(run, attempt):
        if run.taken is not None:
            return _wait_for_name(run, run.taken)
        if run.leftover_objects:
            return _wait_for_strangers(run)
        if run.claim_is_ending and run.attempt < attempt:
            return _free_claim(run)
    return _wait_for_host(run, attempt)


def _wait_for_admission(run: RunSnapshot, attempt: int) -> Decision | None:
    """Return the decision while the queue has not admitted an attempt that is not recorded; None if it has, or if there is no queue.

    A part of the attempt may exist, created before the queue took the room back and observed only now: nothing is added to it.
    """
    update = queueing.pending_admission_condition(run) if run.past.attempt < attempt else None
    if update is None:
        return None
    actions = AT_ONCE if update.status == "True" else Actions(wake_in=queueing.LOOK_SECONDS)
    if run.past.attempt:
        return report_restart(
            run, f"the next attempt waits in the queue: {update.message}", update.reason, actions=actions
        )
    return _not_begun(run, reasons.ADMITTED, update, actions.wake_in)


def _is_whole(run: RunSnapshot, attempt: int) -> bool:
    """Return whether all workloads of `attempt` exist: it then works, recorded or not."""
    trainer = run.statefulset
    trains = trainer is not None and attempt_of(trainer["metadata"]) == attempt
    served = run.deployment is not None or not run.has_own_engines
    own = run.is_training_run and run.host_name is None
    return run.orchestrator(attempt) is not None and (trains or not own) and served


def _untried_workloads(spec: RLRunSpec, made: Sequence[Manifest]) -> list[DryRun]:
    """Return the dry runs of workloads with fields that only the API server can validate."""
    roles: dict[str, Role] = {"StatefulSet": "trainer", "Deployment": "inference", "Pod": "orchestrator"}
    return [DryRun(child) for child in made if _is_unjudged(pod_placement.role_block(spec, roles[child["kind"]]))]


def _is_unjudged(block: PodFields) -> bool:
    extended = any("/" in name for name in (*block.resources.limits, *block.resources.requests))
    return bool(block.pod_template) or block.affinity != Affinity() or extended


def _wait_for_strangers(run: RunSnapshot) -> Decision:
    shown = ", ".join(run.leftover_objects[:4]) + (", …" if len(run.leftover_objects) > 4 else "")
    message = f"objects of a deleted run of this name still exist: {shown}; this run starts when they are gone"
    update = ConditionUpdate("False", reasons.PREVIOUS_RUN_ENDING, message)
    return _not_begun(run, reasons.SCHEDULED, update, LOOK_AGAIN_SECONDS)


def _free_claim(run: RunSnapshot) -> Decision:
    """Delete engines, which outlive attempts: they keep a claim that is being deleted, and new pods cannot use such a claim."""
    engines = [Delete(ref, uid_of(child)) for ref, child in run.engine_deployments if not is_ending(child)]
    message = (
        f"claim {run.wanted.claim} is being deleted, and disappears when no pod uses it; the next attempt then starts on a new "
        "claim: from the model, unless the checkpoints are stored elsewhere"
    )
    actions = Actions(writes=engines, wake_in=LOOK_AGAIN_SECONDS)
    return report_restart(run, message, reasons.CLAIM_DELETED, actions=actions)


def _wait_for_name(run: RunSnapshot, taken: str) -> Decision:
    message = (
        f"{taken} exists and is not of this run, which needs the name and does not change the object; delete or rename it, "
        "or give the run another name"
    )
    if run.past.attempt:
        return report_restart(run, message, reasons.NAME_TAKEN, actions=Actions(wake_in=TAKEN_SECONDS))
    return _not_begun(run, reasons.SCHEDULED, ConditionUpdate("False", reasons.NAME_TAKEN, message), TAKEN_SECONDS)


def _not_begun(
    run: RunSnapshot, kind: str, update: ConditionUpdate, wake_in: float | None = None, change: StatusChange = NO_CHANGE
) -> Decision:
    """Return the decision not to start the first attempt yet; `update` is the condition `kind`, which states the reason."""
    updates = {
        kind: update,
        **storage_at_rest(run),
        reasons.CONFIGURATION_VALID: configuration_condition(run, pending=False),
    }
    change |= StatusChange(
        completion_time=None,
        storage=storage_status(run),
        progress=run_progress.change_progress(run.past.progress, total_steps=run.total_steps),
    )
    return finish_decision(run, updates | not_failed(run.past.conditions), change, Actions(wake_in=wake_in))


def _wait_for_host(run: RunSnapshot, attempt: int) -> Decision | None:
    """Return the decision while the host cannot take this guest; None if it can, or if `attempt` has started already."""
    update = run.host_available
    if update is None or update.status == "True" or (run.orchestrator(attempt) is not None and run.host is not None):
        return None
    # A guest between two attempts reports a restart. Its attempt is recorded as launched, so that an
    # incomplete one is not completed without its host.
    if run.attempt:
        on_record = run.past.attempt == attempt
        message = f"the next attempt waits for the host: {update.message}"
        change = StatusChange(attempt=run.attempt, launched_attempt=run.attempt)
        return report_restart(run, message, update.reason, change, AT_ONCE if on_record else NO_ACTIONS)
    change = StatusChange(shared_with=status_builder.shared_with(run))
    return _not_begun(run, reasons.HOST_AVAILABLE, update, change=change)


def _begin_again(run: RunSnapshot, attempt: int, what: str) -> Decision:
    """End an attempt that cannot be completed, because something changed between the creation of its children; the next attempt replaces
    it."""
    change = StatusChange(attempt=attempt, launched_attempt=attempt)
    if attempt != run.past.attempt:
        change |= StatusChange(checkpoint=status_before_attempt(run).checkpoint)
    return report_restart(run, f"attempt {attempt} is replaced: {what}", reasons.PODS_ENDING, change, AT_ONCE)


def _has_another_key(run: RunSnapshot, child: Manifest, attempt: int) -> bool:
    """Return whether a workload of the attempt was created with another API key than the run's: two operators have checked for the Secret,
    one of them before it was lost. Workloads of earlier attempts do not count, because they are replaced.
    """
    return attempt_of(child["metadata"]) == attempt and key_attempt_of(child["metadata"]) != run.key_attempt


def _existing_workloads(
    run: RunSnapshot, attempt: int, meant: str | None, made: Sequence[Manifest] | None
) -> dict[str, Manifest]:
    """Return the existing workloads of the attempt, by kind.

    Engines outlive attempts: their Deployment counts if it has the specification with the hash `meant` and, when an attempt starts, the
    same rendering as now. `made`: rendered workloads of a starting attempt; None: the attempt has started, and other releases do not change
    it.
    """
    # A StatefulSet belongs to one attempt, by its label. The one of the attempt before may still be in the
    # cache.
    result: dict[str, Manifest] = {}
    if run.statefulset is not None and attempt_of(run.statefulset["metadata"]) == attempt:
        result["StatefulSet"] = run.statefulset
    deployment = run.deployment
    if deployment is not None:
        # Engines that fit stay for the next attempt, because they hold loaded weights. A recorded start is
        # not compared with the rendering of this release: another release keeps its pods.
        now = [child for child in made or () if child["kind"] == "Deployment"]
        kept = run.hash_of(deployment) == meant and (
            made is None or any(_is_as_made(deployment, child) for child in now)
        )
        if kept or attempt_of(deployment["metadata"]) == attempt:
            result["Deployment"] = deployment
    orchestrator = run.orchestrator(attempt)
    if orchestrator is not None:
        result["Pod"] = orchestrator.manifest
    return result


def _is_as_made(deployment: Manifest, made: Manifest) -> bool:
    """Return whether engines can stay: they have the current rendering, and were not edited."""
    return rendering_of(deployment) == rendering_of(made) and not lost_fields(deployment, made)


def _rendered_otherwise(there: Mapping[str, Manifest], made: Sequence[Manifest]) -> bool:
    """Return whether an existing workload does not fit those that would be created next to it. A pod is created last and has no hash."""
    now = {child["kind"]: rendering_of(child) for child in made}
    return any(rendering_of(child) != now.get(kind) for kind, child in there.items())


def _apply_workloads(run: RunSnapshot, made: Sequence[Manifest], recorded: bool) -> list[Apply]:
    """Return the applies of workloads in the order of their creation. After the start is recorded, cached ones of an older attempt are
    left out."""
    older = {"StatefulSet": run.statefulset, "Deployment": run.deployment, "Pod": None}
    kept = [child for child in made if older[child["kind"]] is None or not recorded]
    return [_apply_over(child, older[child["kind"]]) for child in kept]


def _apply_over(child: Manifest, older: Manifest | None) -> Apply:
    version = None if older is None else older["metadata"].get("resourceVersion")
    return Apply(child, expect_absent=older is None, replaces=version)


def _workload_exists(run: RunSnapshot, child: Manifest) -> bool:
    if child["kind"] == "Lease":
        return run.observed.lease is not None
    return run.claim is not None


def _progress_of_before(run: RunSnapshot, spec: RLRunSpec) -> ProgressStatus:
    """Return the progress of the last attempt, which stays until the new attempt reports: lost steps are counted from it."""
    total = spec.max_steps if run.is_training_run else run.past.progress.total_steps
    return run_progress.change_progress(
        run.past.progress,
        waiting_on=None,
        estimated_completion_time=None,
        tokens_per_second=None,
        total_steps=total,
    )
