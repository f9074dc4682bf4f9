"""The run's volume: reports of the roles (the operator mounts no volume), and a claim that is being deleted."""

from __future__ import annotations

from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures.detect import Cause
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.progress import Report

_FIXES = {
    reasons.STORAGE_FULL: "make space on it, or enlarge the claim",
    reasons.STORAGE_READ_ONLY: "look at the node's kernel log and at the storage, and make it writable again",
    reasons.STORAGE_FAILING: "look at the storage and the way to it",
    reasons.STORAGE_SLOW: "look at the storage and the way to it",
}


def storage_condition(report: Report | None, claim: str) -> ConditionUpdate | None:
    """Return StorageReady while the volume of `claim` is unusable, otherwise None."""
    if report is None or report.storage is None:
        return None
    reason, text = report.storage
    return ConditionUpdate("False", reason, f"claim {claim}: {text}; {_FIXES[reason]}: the run continues by itself")


def checkpoint_condition(report: Report) -> ConditionUpdate | None:
    """Return CheckpointHealthy while the volume is unusable: it names the steps that a restart would lose."""
    if report.storage is None:
        return None
    reason, text = report.storage
    base = report.checkpoint_step or 0
    lost = (report.step or 0) - base
    steps = "no step" if not lost else "one step" if lost == 1 else f"{lost} steps"
    since = f"step {base}" if base else "the beginning"
    return ConditionUpdate("False", reason, f"{text}; a restart now would lose {steps}, those since {since}")


def ending_claim_cause(run: RunSnapshot) -> Cause | None:
    """Return the cause that ends an attempt on a claim that is being deleted: scheduled pods keep the claim, and others never get it."""
    pods = run.needed_pods(run.past.attempt)
    serves = any(pod.role == "inference" and pod.node is not None for pod in pods)
    waiting = [pod for pod in pods if pod.node is None and not (serves and pod.role == "inference")]
    if not waiting or not run.claim_is_ending:
        return None
    pod, told = waiting[0], f"claim {run.wanted.claim} is being deleted, and takes no other pod"
    return Cause("disruption", None, pod.role, pod.name, None, None, reasons.CLAIM_DELETED, told)
