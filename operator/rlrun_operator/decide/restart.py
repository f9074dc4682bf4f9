"""Restart: the pods of the ended attempt are removed, the backoff passes, and the next attempt starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlrun.api.lifecycle import NodeLossSpec
from rlrun_operator.decide import hindsight
from rlrun_operator.decide.attempt import launch_attempt, next_attempt
from rlrun_operator.decide.attempt_end import fail_run, failure_record, report_restart
from rlrun_operator.decide.reading.children import desired_replicas, has_let_go, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures import node_loss, policy
from rlrun_operator.pods import Pod
from rlrun_operator.state import Actions, Decision, Delete, Scale
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition, true_since
from rlrun_operator.times import seconds_of

HELD_GRACE_SECONDS = 1
"""Grace period of a trainer pod whose process has ended. Its container was restarted as a placeholder, which may get the signal before its
handler is installed; the first process of a container ignores such a signal and runs until the end of the grace period."""
SETTLE_SECONDS = 3.0
"""Delay after the request to end, before the cache is trusted to contain all pods of a deleted StatefulSet: pods that it created just
before may still be on their way into the cache. Usually another wait takes longer."""


def continue_restart(run: RunSnapshot) -> Decision:
    """Remove the pods of the ended attempt; after that and after the backoff, start the next attempt."""
    if (late := _ended_for_good(run)) is not None:
        return late
    past, because = run.past, _restart_reason(run)
    if run.group or not has_let_go(run.statefulset):
        return _remove_pods(run, because)
    ended = past.last_failure
    failed = ended is not None and ended.attempt == past.attempt  # else the operator has removed everything long ago
    if failed and (settles := settles_in(run, reasons.RESTARTING)) > 0:
        message = f"{because}; no pod is seen any more"
        return report_restart(run, message, reasons.PODS_ENDING, actions=Actions(wake_in=settles))
    if (waits := _backoff_left(run)) is not None:
        message = f"{because}; the next attempt starts at {past.next_retry_time}"
        return report_restart(run, message, reasons.BACK_OFF, actions=Actions(wake_in=waits))
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
    updates = find_condition(past.conditions, reasons.RESTARTING)
    if (
        updates is not None and updates.status == "True"
    ):  # without a failure, the first part of the message is the reason
        return updates.message.partition("; ")[0]
    return because


def _remove_pods(run: RunSnapshot, because: str) -> Decision:
    """Delete the remaining pods, and correct the failure record by their reports."""
    scale, delete = delete_pods(run)
    stuck = overdue_pods(run)
    told = f": {stuck.told}" if stuck.told else list_names(sorted(pod.name for pod in run.group))
    return report_restart(
        run,
        f"{because}; waiting for its pods to be gone{told}",
        reasons.PODS_ENDING,
        hindsight.correct_record(run, stuck.silent),
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
    longest = policy.longest_backoff(run.spec.failure_policy.backoff) if run.spec is not None else math.inf
    if retry_at is None or not run.now < retry_at <= run.now + longest:  # later than that: the clock was set
        return None
    return retry_at - run.now


def _ended_for_good(run: RunSnapshot) -> Decision | None:
    """End the run if Kubernetes reported a peer's failure before the failure that no restart can repair."""
    cause = hindsight.ends_for_good(run)
    if cause is None or run.spec is None:
        return None
    budget = policy.budget_of(run.past, run.past.progress, run.spec.failure_policy)
    what = policy.apply_policy(cause, budget=budget, policy=run.spec.failure_policy, random=run.random)
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
    if not run.trains or began - run.now > SETTLE_SECONDS:  # the clock was set back
        return 0.0
    return began + SETTLE_SECONDS - run.now


def overdue_pods(run: RunSnapshot, *, suspending: bool = False) -> node_loss.Overdue:
    """Return the pods that do not end although the next attempt or a suspension waits for them."""
    kind = reasons.SUSPENDED if suspending else reasons.RESTARTING
    asked = true_since(run.past.conditions, kind, true=not suspending)
    limit = run.spec.node_loss if run.spec is not None else NodeLossSpec()
    seconds = float(limit.force_delete_seconds)
    pods = run.pods if suspending else run.group
    return node_loss.delete_overdue(pods, run.observed.nodes, since=asked, after=seconds, now=run.now)


def delete_pods(run: RunSnapshot) -> tuple[list[Scale], list[Delete]]:
    """Return the deletes of all pods of the attempt: they save together, and end."""
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
