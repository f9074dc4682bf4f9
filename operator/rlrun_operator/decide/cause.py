"""Reason why the current attempt cannot go on, from all that may end one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlrun_operator.decide import host_run
from rlrun_operator.decide.objects import keys, parts, volumes
from rlrun_operator.decide.reading.children import is_ending, replicas
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.failures import detect, node_exclusion
from rlrun_operator.failures.detect import Cause
from rlrun_operator.pods import Pod
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import since


def cause_of(case: Case, settled_at: float | None) -> Cause | None:
    """Cause that ends the current attempt. A guest's ends with its host's, and what the host's trainer breaks does not count."""
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
    """Pods that may end an attempt: not those that nobody asks for, as a StatefulSet takes in, and ends, a foreign pod with its labels."""
    most = max(case.wanted.trainers, replicas(case.statefulset))

    def asked(pod: Pod) -> bool:
        return pod.role != "trainer" or case.host_name is not None or int(pod.name.rpartition("-")[2]) < most

    return [pod for pod in pods if case.is_needed(pod) and asked(pod)]


def settled_at(case: Case) -> float | None:
    """Time at which the attempt's pods were all ready, as far as the status remembers: it trains, or PodsReady is true still."""
    times = [
        since(case.past.conditions, reasons.PODS_READY, true=True),
        since(case.past.conditions, reasons.RECONCILING, true=False),
    ]
    return min((t for t in times if t is not None), default=None)
