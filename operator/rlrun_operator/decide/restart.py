"""Restarts of a run: after the end of an attempt, on request, and for another size of the trainer.

After the end of an attempt its pods are removed, the backoff passes, and the next attempt starts. Requests for a new attempt are more
steps, a manual restart, another API key, and an edit before every role has started.

A change of an elastic trainer's size ends the attempt like a manual restart:

    size recorded (`status.trainer.size`), with Restarting -> the attempt's pods save and end -> the next attempt is rendered with it

The size is absent while the trainer has all of `replicas`. It applies to the next attempt, and to the attempt that has it. An edit of the
specification, a suspension and the end of the run remove it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlrun.api.lifecycle import NodeLossSpec
from rlrun.api.run_status import TrainerStatus
from rlrun_operator.decide import attempt_end, workload_edits
from rlrun_operator.decide.attempt import launch_attempt, next_attempt
from rlrun_operator.decide.attempt_end import fail_run, failure_record, report_restart
from rlrun_operator.decide.elastic_trainer import Choice, Look, Rules, choose_size, grow_delay, look_at, rules_of
from rlrun_operator.decide.lifetime import has_more_steps, restart_request, rotation_request
from rlrun_operator.decide.reading import desired_replicas, has_let_go, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures import failure_policy, node_failures
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import AT_ONCE, Actions, Decision, Delete, EventRecord, Scale
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import StatusChange, find_condition, is_true, true_since
from rlrun_operator.times import format_rfc3339, seconds_of

HELD_GRACE_SECONDS = 1
"""Grace period of a trainer pod whose process has ended. Its container was restarted as a placeholder, which may get the signal before its
handler is installed; the first process of a container ignores such a signal and runs until the end of the grace period."""
SETTLE_SECONDS = 3.0
"""Delay after the request to end, before the cache is trusted to contain all pods of a deleted StatefulSet: pods that it created just
before may still be on their way into the cache. Usually another wait takes longer."""


def continue_restart(run: RunSnapshot) -> Decision:
    """Remove the pods of the ended attempt; after that and after the backoff, start the next attempt."""
    # The first failure may be reported after its consequences. If it is permanent, the run fails even now.
    if (late := _ended_for_good(run)) is not None:
        return late
    past, because = run.past, _restart_reason(run)
    # The next attempt needs the GPUs of this one. A StatefulSet counts as a pod until its controller has
    # observed the size 0, because it may create one more.
    if run.group or not has_let_go(run.statefulset):
        return _remove_pods(run, because)
    ended = past.last_failure
    failed = ended is not None and ended.attempt == past.attempt  # else the operator has removed everything long ago
    if failed and (settles := settles_in(run, reasons.RESTARTING)) > 0:
        message = f"{because}; no pod is seen any more"
        return report_restart(run, message, reasons.PODS_ENDING, actions=Actions(wake_in=settles))
    # The backoff started at the failure, so it overlaps with the removal of the pods.
    if (waits := _backoff_left(run)) is not None:
        message = f"{because}; the next attempt starts at {past.next_retry_time}"
        return report_restart(run, message, reasons.BACK_OFF, actions=Actions(wake_in=waits))
    # An invalid specification fails the run only here: an edit may correct it during the removal and the
    # backoff.
    if run.spec is None:
        return fail_run(run, reasons.INVALID_CONFIGURATION, run.problems)
    return launch_attempt(run, run.spec, next_attempt(run))


def _restart_reason(run: RunSnapshot) -> str:
    """Return the reason of the attempt's end from the status."""
    past, because = run.past, f"attempt {run.past.attempt} ended"
    ended = past.last_failure
    if ended is not None and ended.attempt == past.attempt:
        code = "" if ended.exit_code is None else f" (exit code {ended.exit_code})"
        return f"{because}: {ended.role} pod {ended.pod_name}{code}: {ended.message}"
    # A restart without a failure (a request, an edit, another size) has its reason only in the condition.
    updates = find_condition(past.conditions, reasons.RESTARTING)
    if (
        updates is not None and updates.status == "True"
    ):  # without a failure, the first part of the message is the reason
        return updates.message.partition("; ")[0]
    return because


def _remove_pods(run: RunSnapshot, because: str) -> Decision:
    """Delete the remaining pods, and correct the failure record by their reports."""
    # The writes follow from the objects that still exist, so neither a crash between two of them nor a late
    # pod needs a memory.
    scale, delete = delete_pods(run)
    stuck = overdue_pods(run)
    told = f": {stuck.told}" if stuck.told else list_names(sorted(pod.name for pod in run.group))
    return report_restart(
        run,
        f"{because}; waiting for its pods to be gone{told}",
        reasons.PODS_ENDING,
        attempt_end.correct_record(run, stuck.silent),
        Actions(
            writes=[*scale, *delete, *stuck.force],
            wake_in=stuck.look_in,
            look_up=frozenset(("nodes",)) if stuck.nodes_would_help else frozenset(),
        ),
    )


def list_names(pods: Sequence[str]) -> str:
    """Return the names of pods in brackets, or an empty text."""
    return f" ({', '.join(pods[:4])}{', …' if len(pods) > 4 else ''})" if pods else ""


def _backoff_left(run: RunSnapshot) -> float | None:
    """Return the seconds until the next attempt may start, or None if it may start now."""
    retry_at = seconds_of(run.past.next_retry_time)
    longest = failure_policy.longest_backoff(run.spec.failure_policy.backoff) if run.spec is not None else math.inf
    if retry_at is None or not run.now < retry_at <= run.now + longest:  # later than that: the clock was set
        return None
    return retry_at - run.now


def _ended_for_good(run: RunSnapshot) -> Decision | None:
    """End the run if Kubernetes reported a peer's failure before the failure that no restart can repair."""
    cause = attempt_end.ends_for_good(run)
    if cause is None or run.spec is None:
        return None
    budget = failure_policy.budget_of(run.past, run.past.progress, run.spec.failure_policy)
    what = failure_policy.apply_policy(cause, budget=budget, policy=run.spec.failure_policy, random=run.random)
    if what.fails is None:
        return None
    return fail_run(run, *what.fails, failure_record(run, cause, counted=False), corrects=True)


def settles_in(run: RunSnapshot, kind: str) -> float:
    """Return the seconds until the cache is trusted to contain no pods of the trainer.

    Args:
        run: snapshot of the run.
        kind: type of the condition whose transition is the request to end: Restarting or Suspended.
    """
    began = true_since(run.past.conditions, kind, true=kind == reasons.RESTARTING)
    if not run.past.attempt or began is None or run.statefulset is not None or run.host_name is not None:
        return 0.0
    if not run.is_training_run or began - run.now > SETTLE_SECONDS:  # the clock was set back
        return 0.0
    return began + SETTLE_SECONDS - run.now


def overdue_pods(run: RunSnapshot, *, suspending: bool = False) -> node_failures.Overdue:
    """Return the pods that do not end although the next attempt or a suspension waits for them."""
    kind = reasons.SUSPENDED if suspending else reasons.RESTARTING
    asked = true_since(run.past.conditions, kind, true=not suspending)
    limit = run.spec.node_loss if run.spec is not None else NodeLossSpec()
    seconds = float(limit.force_delete_seconds)
    pods = run.pods if suspending else run.group
    return node_failures.delete_overdue(pods, run.observed.nodes, since=asked, after=seconds, now=run.now)


def delete_pods(run: RunSnapshot) -> tuple[list[Scale], list[Delete]]:
    """Return the deletes of all pods of the attempt: they save together, and end."""
    # The StatefulSet is scaled to 0, because it would recreate deleted pods. Without it, or while it is being
    # deleted, nothing else removes the trainer pods.
    scale, statefulset = [], run.statefulset
    if statefulset is not None and not is_ending(statefulset) and desired_replicas(statefulset) != 0:
        scale.append(Scale(run.trainer_ref, uid_of(statefulset), 0))
    orphaned = statefulset is None or is_ending(statefulset)
    ends = [p for p in run.group if p.deleted_at is None and (orphaned or p.role == "orchestrator")]
    return scale, [*(Delete(pod.ref, pod.uid) for pod in ends), *shorten_grace(run)]


def shorten_grace(run: RunSnapshot) -> list[Delete]:
    """Shorten the grace period of terminating trainer pods whose process has ended: they have nothing left to save."""
    held = [pod for pod in run.group if pod.role == "trainer" and pod.exit is not None and _lingers_too_long(pod)]
    return [Delete(pod.ref, pod.uid, grace_seconds=HELD_GRACE_SECONDS) for pod in held]


def _lingers_too_long(pod: Pod) -> bool:
    """Return whether a terminating pod has more time left than its placeholder needs."""
    return int(pod.manifest["metadata"].get("deletionGracePeriodSeconds") or 0) > HELD_GRACE_SECONDS


def revive_ended_run(run: RunSnapshot) -> Decision | None:
    """Restart an ended run: a Complete run with more steps, or a Failed run with a restart request, with a fresh budget."""
    if run.spec is None:
        return None
    if is_true(run.past.conditions, reasons.COMPLETE):
        return more_steps(run) if has_more_steps(run) else None
    request = restart_request(run)
    if not is_true(run.past.conditions, reasons.FAILED) or seconds_of(request) is None:
        return None
    return report_restart(
        run,
        f"the run had failed and restarts, as the annotation {RESTART_ANNOTATION} requests ({request})",
        reasons.PODS_ENDING,
        StatusChange(
            restarts=run.past.restarts + 1,
            restarts_counted_towards_max=0,
            restarts_without_step=0,
            counted_at_step=None,
            next_retry_time=None,
            restart_requested_at=request,
            launched_attempt=run.past.attempt,
            active_seconds=0,
        ),
        AT_ONCE,
    )


def more_steps(run: RunSnapshot) -> Decision:
    """Start an attempt for more steps: the current one has trained all its steps, and `maxSteps` was raised."""
    message = f"maxSteps has grown from {run.past.max_steps} to {run.total_steps}: the next attempt trains the rest"
    return report_restart(run, message, reasons.PODS_ENDING, StatusChange(next_retry_time=None), AT_ONCE)


def restart_by_request(run: RunSnapshot, *, is_restarting: bool) -> Decision | None:
    """Restart by request, which is not counted; during a restart the request ends the backoff.

    A request for another key also restarts the attempt. During a restart, the next attempt gets the new key.
    """
    # A new key does not end the backoff of a restart that is in progress: the attempt after it gets the key
    # anyway.
    request, rotation = restart_request(run), rotation_request(run)
    restarts = seconds_of(request) is not None
    rotates = seconds_of(rotation) is not None and not is_restarting
    begins = run.attempt != run.past.attempt or not run.attempt
    if begins or run.spec is None or not (restarts or rotates):
        return None  # the starting attempt fulfills the request
    if is_restarting and run.past.next_retry_time is None:
        return None
    asks = f"{ROTATE_ANNOTATION} requests ({rotation})" if rotates else f"{RESTART_ANNOTATION} requests ({request})"
    change = StatusChange(
        attempt=run.attempt,
        launched_attempt=run.attempt,
        restarts=run.past.restarts + (not is_restarting),
        next_retry_time=None,
    )
    if restarts:
        change |= StatusChange(restart_requested_at=request)
    if rotates:
        change |= StatusChange(key_rotation_requested_at=rotation, key_attempt=run.attempt + 1)
    message = f"attempt {run.attempt} ends, as the annotation {asks}"
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def restart_after_edit(run: RunSnapshot) -> Decision | None:
    """Restart an attempt whose specification was edited before each role had started; the restart does not count."""
    attempt = run.past.attempt
    if run.spec is None or run.spec_hash == run.past.spec_hash or not workload_edits.unstarted_roles(run, attempt):
        return None
    # `launched_attempt` is set, so that the incomplete attempt is not completed while its pods end.
    message = f"attempt {attempt} is replaced: the specification was edited before all of its roles had started"
    change = StatusChange(launched_attempt=attempt, next_retry_time=None)
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def warn_invalid_annotation(run: RunSnapshot, decision: Decision) -> Decision:
    """Report an annotation whose value is not a time, once, and ignore it."""
    fix = "write the current time, as `date -u +%FT%TZ` prints it"
    requests = (
        (restart_request(run), RESTART_ANNOTATION, reasons.RESTART_REQUEST_INVALID, "restartRequestedAt"),
        (rotation_request(run), ROTATE_ANNOTATION, reasons.KEY_ROTATION_REQUEST_INVALID, "keyRotationRequestedAt"),
    )
    for request, annotation, reason, report in requests:
        if request is None or seconds_of(request) is not None:
            continue
        event = EventRecord("Warning", reason, f"{annotation} ({request}) is not a time; {fix}")
        status = {**decision.status, report: request}
        decision = replace(decision, status=status, urgency="now", events=(*decision.events, event))
    return decision


def resize_trainer(run: RunSnapshot) -> Decision | None:
    """End the attempt for another size of its trainer; None if it continues."""
    look, rules = look_at(run), rules_of(run)
    if look is None or rules is None:
        return None
    choice = choose_size(look, rules)
    if choice.size == look.size:
        return None
    attempt = run.past.attempt
    change = StatusChange(
        attempt=attempt,
        launched_attempt=attempt,
        restarts=run.past.restarts + 1,
        next_retry_time=None,
        trainer=_record_size(run, rules, look, choice),
    )
    message = f"attempt {attempt} ends for another size of the trainer: {choice.why}".replace("; ", ", ")
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def _record_size(run: RunSnapshot, rules: Rules, look: Look, choice: Choice) -> TrainerStatus:
    """Return `status.trainer` with the chosen size."""
    assert run.spec is not None
    # `grown_from` stays until the trainer trains. A shrink before that shows that the growth found no nodes,
    # which doubles the delay until the next one.
    past, grows = run.past.trainer, choice.size > look.size
    in_vain = past.grown_from is not None and not grows
    growths = (past.growths or 0) + in_vain
    return TrainerStatus(
        desired=choice.size,
        ready=0,
        size=choice.size if choice.size < run.spec.trainer.replicas else None,
        reason=choice.why,
        changed=format_rfc3339(run.now),
        grow_time=format_rfc3339(run.now + grow_delay(rules, growths)),
        grown_from=look.size if grows else None,
        growths=growths or None,
    )
