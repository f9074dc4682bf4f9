"""The roles' reports about their volume, for the conditions: the operator itself mounts none."""

from __future__ import annotations

from rlrun_operator import reasons
from rlrun_operator.conditions import Say
from rlrun_operator.progress import Report

_FIXES = {
    reasons.STORAGE_FULL: "make space on it, or enlarge the claim",
    reasons.STORAGE_READ_ONLY: "look at the node's kernel log and at the storage, and make it writable again",
    reasons.STORAGE_SLOW: "look at the storage and the way to it",
}


def ready(report: Report | None, claim: str) -> Say | None:
    """StorageReady, while the volume of `claim` is of no use; None while nothing is wrong with it."""
    if report is None or report.storage is None:
        return None
    reason, text = report.storage
    return Say("False", reason, f"claim {claim}: {text}; {_FIXES[reason]}: the run goes on by itself")


def checkpoints(report: Report) -> Say | None:
    """CheckpointHealthy, while the volume is of no use: what a restart would lose now."""
    if report.storage is None:
        return None
    reason, text = report.storage
    base = report.checkpoint_step or 0
    lost = (report.step or 0) - base
    steps = "no step" if not lost else "one step" if lost == 1 else f"{lost} steps"
    since = f"step {base}" if base else "the beginning"
    return Say("False", reason, f"{text}; a restart now would lose {steps}, those since {since}")
