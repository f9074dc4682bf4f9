"""Facts of one child of a run, read from its manifest alone."""

from __future__ import annotations

from rlrun_operator.names import RENDERING_ANNOTATION, REPLICA_FAILURE
from rlrun_operator.state import Manifest


def is_ending(child: Manifest) -> bool:
    """True if an object's deletion was requested."""
    return "deletionTimestamp" in child["metadata"]


def uid_of(child: Manifest) -> str:
    """UID, which distinguishes an object from its successors of the same name."""
    return str(child["metadata"]["uid"])


def desired_replicas(child: Manifest | None) -> int:
    """Number of pods that a workload asks for."""
    return int(((child or {}).get("spec") or {}).get("replicas") or 0)


def rendering_of(child: Manifest) -> str | None:
    """Mark of how a workload's pods were rendered; None: rendered by a release before there were marks, or a single pod."""
    found = (child["metadata"].get("annotations") or {}).get(RENDERING_ANNOTATION)
    return str(found) if found is not None else None


def is_refused(deployment: Manifest | None) -> bool:
    """True if a Deployment's controller may not make a pod now."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    return any(c["type"] == REPLICA_FAILURE and c["status"] == "True" for c in conditions)


def has_let_go(statefulset: Manifest | None) -> bool:
    """True if the StatefulSet's controller itself knows that no pods are wanted, so that none appears any more."""
    if statefulset is None:
        return True
    status = statefulset.get("status") or {}
    generation = statefulset["metadata"].get("generation", 0)
    seen = status.get("observedGeneration", 0) >= generation
    return not is_ending(statefulset) and desired_replicas(statefulset) == 0 and seen and not status.get("replicas")
