"""Facts of one child of a run, read from its manifest only."""

from __future__ import annotations

from rlrun_operator.names import RENDERING_ANNOTATION, REPLICA_FAILURE
from rlrun_operator.state import Manifest


def is_ending(child: Manifest) -> bool:
    """Return whether an object is being deleted."""
    return "deletionTimestamp" in child["metadata"]


def uid_of(child: Manifest) -> str:
    """Return the UID, which distinguishes an object from later objects of the same name."""
    return str(child["metadata"]["uid"])


def desired_replicas(child: Manifest | None) -> int:
    """Return the number of pods that a workload requests."""
    return int(((child or {}).get("spec") or {}).get("replicas") or 0)


def rendering_of(child: Manifest) -> str | None:
    """Return the hash of a workload's rendered pods, or None for a single pod and for workloads of releases without this hash."""
    found = (child["metadata"].get("annotations") or {}).get(RENDERING_ANNOTATION)
    return str(found) if found is not None else None


def is_refused(deployment: Manifest | None) -> bool:
    """Return whether the API server refuses the pods of a Deployment now."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    return any(c["type"] == REPLICA_FAILURE and c["status"] == "True" for c in conditions)


def has_let_go(statefulset: Manifest | None) -> bool:
    """Return whether the StatefulSet's controller has observed the scale to zero, so that it creates no more pods."""
    if statefulset is None:
        return True
    status = statefulset.get("status") or {}
    generation = statefulset["metadata"].get("generation", 0)
    seen = status.get("observedGeneration", 0) >= generation
    return not is_ending(statefulset) and desired_replicas(statefulset) == 0 and seen and not status.get("replicas")
