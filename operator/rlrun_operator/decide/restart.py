"""Way from an ended attempt to the next one: its pods are removed, the backoff passes, and the next attempt begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlrun.api.lifecycle import NodeLossSpec
from rlrun_operator.decide import hindsight
from rlrun_operator.decide.attempt import launch, next_attempt
from rlrun_operator.decide.attempt_end import fail, failure_record, restarting
from rlrun_operator.decide.reading.children import has_let_go, is_ending, replicas, uid_of
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.failures import node_loss, policy
from rlrun_operator.pods import Pod
from rlrun_operator.state import Actions, Decision, Delete, Scale
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find, since
from rlrun_operator.times import seconds_of

HELD_GRACE_SECONDS = 1
"""For a trainer pod whose process has ended. Its container was started again to hold still; the signal to end may come before that one
can hear it, and the first process of a container that does not hear it lives on to the end of the grace period."""
SETTLE_SECONDS = 3.0
"""The cache is believed that a StatefulSet that is gone has left no pod so long after its end was wanted: what it made just before may
still be on its way. Mostly there is something to wait for that takes longer."""


def restart(case: Case) -> Decision:
    """Remove the ended attempt's pods; once they are gone and the backoff is over, begin the next attempt."""
    if (late := _ended_for_good(case)) is not None:
        return late
    past, because = case.past, _because(case)
    if case.group or not has_let_go(case.statefulset):
        return _remove(case, because)
    ended = past.last_failure
    failed = ended is not None and ended.attempt == past.attempt  # else the operator has removed everything long ago
    if failed and (settles := settles_in(case, reasons.RESTARTING)) > 0:
        message = f"{because}; no pod is seen any more"
        return restarting(case, message, reasons.PODS_ENDING, actions=Actions(wake_in=settles))
    if (waits := _backoff_left(case)) is not None:
        message = f"{because}; the next attempt begins at {past.next_retry_time}"
        return restarting(case, message, reasons.BACK_OFF, actions=Actions(wake_in=waits))
    if case.spec is None:
        return fail(case, reasons.INVALID_CONFIGURATION, case.problems)
    return launch(case, case.spec, next_attempt(case))


def _because(case: Case) -> str:
    """Reason of the attempt's end, as the status has it."""
    past, because = case.past, f"attempt {case.past.attempt} ended"
    ended = past.last_failure
    if ended is not None and ended.attempt == past.attempt:
        code = "" if ended.exit_code is None else f" (exit code {ended.exit_code})"
        return f"{because}: {ended.role} pod {ended.pod_name}{code}: {ended.message}"
    said = find(past.conditions, reasons.RESTARTING)
    if said is not None and said.status == "True":  # nothing failed: what was said first says why
        return said.message.partition("; ")[0]
    return because


def _remove(case: Case, because: str) -> Decision:
    """Have the pods that are left removed, and correct the record by what they report."""
    scale, delete = removals(case)
    stuck = overdue(case)
    told = f": {stuck.told}" if stuck.told else listed(sorted(pod.name for pod in case.group))
    return restarting(
        case,
        f"{because}; waiting for its pods to be gone{told}",
        reasons.PODS_ENDING,
        hindsight.corrections(case, stuck.silent),
        Actions(
            scale=scale,
            delete=[*delete, *stuck.force],
            wake_in=stuck.look_in,
            look_up=frozenset(("nodes",)) if stuck.nodes_would_help else frozenset(),
        ),
    )


def listed(pods: Sequence[str]) -> str:
    """Names of pods, in brackets; empty where there is none."""
    return f" ({', '.join(pods[:4])}{', …' if len(pods) > 4 else ''})" if pods else ""


def _backoff_left(case: Case) -> float | None:
    """Seconds until the next attempt may begin; None: it may."""
    retry_at = seconds_of(case.past.next_retry_time)
    longest = policy.longest_backoff(case.spec.failure_policy.backoff) if case.spec is not None else math.inf
    if retry_at is None or not case.now < retry_at <= case.now + longest:  # later than that: the clock was set
        return None
    return retry_at - case.now


def _ended_for_good(case: Case) -> Decision | None:
    """End of the run, where Kubernetes reported a peer's failure before the one that no restart can repair."""
    cause = hindsight.ends_for_good(case)
    if cause is None or case.spec is None:
        return None
    budget = policy.budget_of(case.past, case.past.progress, case.spec.failure_policy)
    what = policy.verdict(cause, budget=budget, policy=case.spec.failure_policy, random=case.random)
    if what.fails is None:
        return None
    return fail(case, *what.fails, failure_record(case, cause, counted=False), corrects=True)


def settles_in(case: Case, kind: str) -> float:
    """Seconds until the cache is believed that there is no trainer.

    Args:
        kind: of the condition that says since when there shall be none: Restarting, or Suspended.
    """
    began = since(case.past.conditions, kind, true=kind == reasons.RESTARTING)
    if not case.past.attempt or began is None or case.statefulset is not None or case.host_name is not None:
        return 0.0
    if not case.trains or began - case.now > SETTLE_SECONDS:  # the clock was set back
        return 0.0
    return began + SETTLE_SECONDS - case.now


def overdue(case: Case, *, suspending: bool = False) -> node_loss.Overdue:
    """Pods that do not end, of those that have to be gone before the next attempt or on the way into suspension."""
    kind = reasons.SUSPENDED if suspending else reasons.RESTARTING
    asked = since(case.past.conditions, kind, true=not suspending)
    limit = case.spec.node_loss if case.spec is not None else NodeLossSpec()
    seconds = float(limit.force_delete_seconds)
    pods = case.pods if suspending else case.group
    return node_loss.overdue(pods, case.observed.nodes, since=asked, after=seconds, now=case.now)


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
    """True if a pod was given more time to end than what holds there needs."""
    return int(pod.manifest["metadata"].get("deletionGracePeriodSeconds") or 0) > HELD_GRACE_SECONDS
