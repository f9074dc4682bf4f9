"""Cause that ends the current attempt, out of all possible causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlrun_operator.decide import host_run
from rlrun_operator.decide.objects import keys, parts, volumes
from rlrun_operator.decide.reading.children import desired_replicas, is_ending
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures import detect, node_exclusion
from rlrun_operator.failures.detect import Cause
from rlrun_operator.pods import Pod
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import true_since


def cause_of(run: RunSnapshot, settled_at: float | None) -> Cause | None:
    """Return the cause that ends the current attempt, or None. A guest's attempt ends with its host's, and such an end does not count."""
    attempt = run.past.attempt
    guest = run.host_name is not None
    lost = host_run.explain_lost_host(run.observed.run, run.observed.host, run.host_mark(attempt)) if guest else None
    if lost is not None:
        return lost
    cause = detect.first_cause(
        _without_surplus(run, run.pods),
        _without_surplus(run, run.gone),
        attempt,
        run.names,
        trainers=min(run.wanted.trainers, desired_replicas(run.statefulset)),
        has_statefulset=guest or not run.trains or (run.statefulset is not None and not is_ending(run.statefulset)),
        settled_at=settled_at,
        now=run.now,
    )
    if guest and cause is not None and cause.kind == "failure" and not host_run.trainer_ready(run.observed.host):
        return replace(cause, kind="disruption")
    return (
        cause
        or volumes.ending_claim_cause(run)
        or parts.missing_configuration_cause(run)
        or keys.missing_key_cause(run)
        or node_exclusion.lift_exclusions(run.pods_of_attempt(attempt), run.past, run.now)
    )


def _without_surplus(run: RunSnapshot, pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods that may end an attempt. A StatefulSet adopts and deletes foreign pods with its labels: these do not count."""
    most = max(run.wanted.trainers, desired_replicas(run.statefulset))

    def is_wanted(pod: Pod) -> bool:
        return pod.role != "trainer" or run.host_name is not None or int(pod.name.rpartition("-")[2]) < most

    return [pod for pod in pods if run.is_needed(pod) and is_wanted(pod)]


def settled_at(run: RunSnapshot) -> float | None:
    """Return the time at which all pods of the attempt were ready, according to the status: it trains, or PodsReady is still true."""
    times = [
        true_since(run.past.conditions, reasons.PODS_READY, true=True),
        true_since(run.past.conditions, reasons.RECONCILING, true=False),
    ]
    return min((t for t in times if t is not None), default=None)
