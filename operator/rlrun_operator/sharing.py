"""Runs that share a trainer: which is whose guest, by the documents alone. The store and the decisions read it here."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.state import Json, Manifest

_OVER = ("Complete", "Failed", "Suspended")
_TOLD = ("phase", "attempt", "launchedAttempt", "trainer", "inference", "reason")
"""Status fields that runs that share a trainer read of each other."""


def host_name(run: Manifest | None) -> str | None:
    """The run whose trainer this one uses; None: its own. The specification may be malformed."""
    trainer = ((run or {}).get("spec") or {}).get("trainer")
    name = trainer.get("sharedWith") if isinstance(trainer, Mapping) else None
    return name if isinstance(name, str) and name else None


def is_ending(run: Manifest) -> bool:
    """True if the object is being deleted."""
    return "deletionTimestamp" in run["metadata"]


def holds_slot(guest: Manifest) -> bool:
    """True if a guest has begun and is neither over nor suspended: between two of its attempts too."""
    status = guest.get("status") or {}
    return bool(status.get("attempt")) and status.get("phase") not in _OVER and not is_ending(guest)


def shared_run_status(run: Manifest) -> Json:
    """Inputs for the runs that share a trainer with `run`: they are looked at again when these change."""
    status = run.get("status") or {}
    metadata = {key: run["metadata"].get(key) for key in ("uid", "generation", "deletionTimestamp")}
    told = {key: status.get(key) for key in _TOLD}
    inference = told["inference"]  # of any type: another client may have written it
    if isinstance(inference, Mapping):
        told["inference"] = {**inference, "weightVersion": None}
    return {"host": host_name(run), **metadata, **told}
