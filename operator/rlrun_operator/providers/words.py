"""Translation of Kueue's conditions: reason and message of the run's condition Admitted."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.providers.model import Subject
from rlrun_operator.providers.workload import SUSPENDED_ANNOTATION, holds_true, kueue_condition
from rlrun_operator.state import Admission, Manifest
from rlrun_operator.status import reasons

REASONS: Mapping[str, str] = {
    "WaitingForQuota": reasons.WAITING_FOR_RESOURCES,
    "ExceedsMaxQuota": reasons.NEVER_FITS,
    "NoMatchingFlavor": reasons.NEVER_FITS,
    "TopologyPlacementFailed": reasons.WAITING_FOR_RESOURCES,
    "WaitingForPreemptedWorkloads": reasons.WAITING_FOR_TURN,
    "WaitingForPodsReady": reasons.WAITING_FOR_TURN,
    "PendingEvaluation": reasons.WAITING_FOR_TURN,
    "Misconfigured": reasons.QUEUE_MISCONFIGURED,
    "Suspended": reasons.WAITING_FOR_TURN,
    "OnHold": reasons.WAITING_FOR_TURN,
    "AdmissionGated": reasons.WAITING_FOR_TURN,
    "Pending": reasons.WAITING_FOR_RESOURCES,  # Pending and Inadmissible: Kueue before 0.19
    "Inadmissible": reasons.QUEUE_MISCONFIGURED,
}
"""Reason of QuotaReserved -> reason of the run's condition Admitted."""
_PENDING = "Pending"
_NEVER = ("> maximum capacity", "unavailable in ClusterQueue")
_LATER = "insufficient unused quota"
"""Texts of releases before 0.19, which have one reason for all waits: Kueue 0.17, flavorassigner.go."""


def refused_answer(reason: str, message: str, *, stops: bool = False) -> Admission:
    """Return the answer that a run may have no pods."""
    return Admission(False, reason, message, stops=stops)


def waiting_answer(run: Subject, workload: Manifest) -> Admission:
    """Return the answer for a run that Kueue has not admitted."""
    name = workload["metadata"]["name"]
    if (workload.get("spec") or {}).get("active") is False and not _is_suspended(workload):
        evicted = kueue_condition(workload, "Evicted")
        why = f" ({_describe_condition(evicted)})" if evicted.get("status") == "True" else ""
        fix = f"set spec.active of Workload {name} to true, or suspend the run and resume it"
        return refused_answer(
            reasons.DEACTIVATED, f"the run's Workload was deactivated, so Kueue does not admit it{why}; {fix}"
        )
    later = ((workload.get("status") or {}).get("requeueState") or {}) if _is_held_back(workload) else {}
    if at := later.get("requeueAt"):
        count = later.get("count", 1)
        times = "once" if count == 1 else f"{count} times"
        return refused_answer(
            reasons.BACKING_OFF,
            f"Kueue evicted the run {times}, because not all pods were ready in time; it retries at {at}",
        )
    quota = kueue_condition(workload, "QuotaReserved")
    if quota.get("status") == "True":
        return refused_answer(
            reasons.WAITING_FOR_TURN, f"LocalQueue {run.queue}: quota is reserved; {_describe_checks(workload)}"
        )
    if not quota:
        return not_judged(run)
    text, queue = _describe_condition(quota), f"LocalQueue {run.queue}"
    return refused_answer(_waiting_reason(quota), text if text.startswith(queue) else f"{queue}: {text}")


def _waiting_reason(quota: Mapping[str, object]) -> str:
    """Return the reason of Admitted for a condition QuotaReserved; one flavor with room later is enough for a wait."""
    reason, message = str(quota.get("reason")), str(quota.get("message"))
    if reason == _PENDING and _LATER not in message and any(text in message for text in _NEVER):
        return reasons.NEVER_FITS
    return REASONS.get(reason, reasons.WAITING_FOR_RESOURCES)


def not_judged(run: Subject) -> Admission:
    """Return the answer before Kueue's first condition."""
    message = f"LocalQueue {run.queue}: Kueue has not processed the run's Workload yet"
    return refused_answer(reasons.WAITING_FOR_TURN, message)


def evicted_answer(workload: Manifest) -> Admission:
    """Return the answer for a run with pods that has lost its admission."""
    evicted = kueue_condition(workload, "Evicted")
    if evicted.get("status") != "True":
        active = (workload.get("spec") or {}).get("active") is not False
        why = "its Workload is not admitted" if active else "its Workload was deactivated"
        return refused_answer(reasons.EVICTED, f"Kueue evicts the run: {why}", stops=True)
    reason = reasons.PREEMPTED if evicted.get("reason") == "Preempted" else reasons.EVICTED
    return refused_answer(reason, f"Kueue evicts the run: {_describe_condition(evicted)}", stops=True)


def lost_answer() -> Admission:
    """Return the answer for a run with pods and without a Workload."""
    message = (
        "the run's Workload was deleted, which ends its admission; the operator creates it again after the last pod"
    )
    return refused_answer(reasons.EVICTED, message, stops=True)


def _describe_condition(condition: Mapping[str, object]) -> str:
    reason, message = condition.get("reason") or "no reason given", str(condition.get("message") or "").strip()
    return f"{message} ({reason})" if message else str(reason)


def _is_suspended(workload: Manifest) -> bool:
    return SUSPENDED_ANNOTATION in (workload["metadata"].get("annotations") or {})


def _is_held_back(workload: Manifest) -> bool:
    return not holds_true(workload, "QuotaReserved") and kueue_condition(workload, "Requeued").get("status") == "False"


def _describe_checks(workload: Manifest) -> str:
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    open_ones = [
        f"{one.get('name')} is {one.get('state')}" + (f" ({one['message']})" if one.get("message") else "")
        for one in checks
        if one.get("state") != "Ready"
    ]
    return "admission checks: " + ", ".join(open_ones) if open_ones else "its topology or its checks are not ready"
