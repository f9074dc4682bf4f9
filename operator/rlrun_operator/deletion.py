"""Time at which a pod was first asked to end. Pure.

Kubernetes does not keep that: `deletionTimestamp` less the grace period is the moment of the last request with a shorter grace period, and
the kubelet itself makes one, without any grace, when all containers are gone. By that time a process that had merely done what it was asked
seems to have ended before it was asked to. So the first request that was seen is kept with the pod.
"""

from __future__ import annotations

from rlrun_operator.state import Manifest
from rlrun_operator.times import seconds_of

SHORTEST_GRACE_SECONDS = 1
"""A request with so little grace, or none, may not be the first one."""
_FIRST = "firstDeletion"
"""Key in the metadata of a pod in the store: seconds since the epoch."""


def remember_deletion(pod: Manifest, known: Manifest | None) -> Manifest:
    """`pod` with the first deletion from `known`, the state of the same name before."""
    if known is None or known["metadata"].get("uid") != pod["metadata"].get("uid"):
        return pod
    first = first_asked_at(known["metadata"])
    return pod if first is None else {**pod, "metadata": {**pod["metadata"], _FIRST: first}}


def first_asked_at(metadata: Manifest) -> float | None:
    """Time of the first request, in seconds since the epoch; None: there was none, or it is not known."""
    if (first := metadata.get(_FIRST)) is not None:
        return float(first)
    return asked_at(metadata) if (metadata.get("deletionGracePeriodSeconds") or 0) > SHORTEST_GRACE_SECONDS else None


def asked_at(metadata: Manifest) -> float | None:
    """Time of the last request with a shorter grace period, likewise; the timestamp is when the grace period ends."""
    ends = seconds_of(metadata.get("deletionTimestamp"))
    return None if ends is None else ends - (metadata.get("deletionGracePeriodSeconds") or 0)
