"""Conditions of a run on one machine, with the operator's types and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlrun.inspect.snapshot import Condition, Snapshot
from rlrun.protocol.files.failures import volume_is_full
from rlrun.protocol.files.launcher import LauncherRecord
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.printable import printable

_SILENT_SECONDS = 60.0
"""Seconds without a response of the orchestrator after which the run gets the reason HeartbeatLost."""


def with_conditions(
    run: Snapshot, paths: RunPaths, role: Mapping[str, object], record: LauncherRecord | None, now: float
) -> Snapshot:
    """Add the operator's conditions that apply to one machine, and a reason if the run has none."""
    storage, progress = _storage_condition(paths, record), _progress_condition(run, served=record is not None)
    checkpoint = _checkpoint_condition(run, role) if role.get("task") != "Eval" else None
    known = [one for one in (storage, checkpoint, progress) if one is not None]
    if run.reason is None:
        first = next(
            (one for one in known if one.reason.startswith("Storage") or one.reason == "HeartbeatLost"), known[-1]
        )
        run = replace(run, reason=first.reason, message=first.message)
    return replace(run, conditions=tuple(known))


def _progress_condition(run: Snapshot, *, served: bool) -> Condition | None:
    """Return the condition of the run's phase. `served`: whether a launcher runs it."""
    if run.phase == "Starting":
        waits = run.wait.text if run.wait is not None else run.message or "the roles to start"
        return Condition("Progressing", "Unknown", "WaitingForFirstStep", waits)
    if run.phase == "Running":
        silent = run.heard_seconds or 0.0
        if served and silent > _SILENT_SECONDS:
            text = f"the orchestrator has not responded to its launcher for {int(silent)} s"
            return Condition("Progressing", "Unknown", "HeartbeatLost", text)
        return Condition("Progressing", "True", "Training", f"step {run.progress.step}")
    if run.reason is None:
        return None
    kind = run.phase if run.phase in ("Complete", "Failed") else "Suspended"
    return Condition(kind, "True", run.reason, run.message or "", run.ended)


def _storage_condition(paths: RunPaths, record: LauncherRecord | None) -> Condition | None:
    trouble = record.progress.get("storage") if record is not None else None
    if isinstance(trouble, Mapping) and trouble.get("reason"):
        return Condition("StorageReady", "False", str(trouble["reason"]), printable(str(trouble.get("text") or "")))
    if volume_is_full(paths.root):
        return Condition("StorageReady", "False", "StorageFull", f"the volume of {paths.root} is full")
    return None


def _checkpoint_condition(run: Snapshot, role: Mapping[str, object]) -> Condition:
    checkpoint = role.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("enabled") is False:
        return Condition("CheckpointHealthy", "False", "CheckpointsOff", "checkpoint.enabled is false")
    step = run.progress.checkpoint_step
    if step is None:
        return Condition("CheckpointHealthy", "False", "NoCheckpointYet", "there is no complete checkpoint yet")
    return Condition("CheckpointHealthy", "True", "CheckpointsComplete", f"the checkpoint of step {step} is complete")
