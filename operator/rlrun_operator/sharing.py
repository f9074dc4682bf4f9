"""Runs that share a trainer: relation of hosts and guests, read from their documents. Used by the store and the decisions."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.state import Json, Manifest

_OVER = ("Complete", "Failed", "Suspended")
_SHARED_FIELDS = ("phase", "attempt", "launchedAttempt", "trainer", "inference", "reason")
"""Status fields that runs with a common trainer read from each other."""


def host_name(run: Manifest | None) -> str | None:
    """Return the run whose trainer this run uses, or None for its own. The specification may be malformed."""
    trainer = ((run or {}).get("spec") or {}).get("trainer")
    name = trainer.get("sharedWith") if isinstance(trainer, Mapping) else None
    return name if isinstance(name, str) and name else None


def is_ending(run: Manifest) -> bool:
    """Return whether the object is being deleted."""
    return "deletionTimestamp" in run["metadata"]


def holds_slot(guest: Manifest) -> bool:
    """Return whether a guest occupies an adapter slot: it has started, also between two attempts, and is not over or suspended."""
    status = guest.get("status") or {}
    return bool(status.get("attempt")) and status.get("phase") not in _OVER and not is_ending(guest)


def shared_run_status(run: Manifest) -> Json:
    """Return the fields of `run` on which runs with the same trainer depend; a change of one triggers their next pass."""
    status = run.get("status") or {}
    metadata = {key: run["metadata"].get(key) for key in ("uid", "generation", "deletionTimestamp")}
    fields = {key: status.get(key) for key in _SHARED_FIELDS}
    inference = fields["inference"]  # of any type: another client may have written it
    if isinstance(inference, Mapping):
        fields["inference"] = {**inference, "weightVersion": None}
    return {"host": host_name(run), **metadata, **fields}
