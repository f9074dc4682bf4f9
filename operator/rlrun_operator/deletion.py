"""Time at which the deletion of a pod was first requested. Pure.

Kubernetes does not keep this time. `deletionTimestamp` minus the grace period is the time of the last request with a shorter grace
period, and the kubelet itself sends such a request, with a grace period of 0, once all containers have ended. A process that only obeyed
the first request would then seem to have ended before any request. Therefore the store keeps the first observed request with the pod.
"""

from __future__ import annotations

from rlrun_operator.state import Manifest
from rlrun_operator.times import seconds_of

SHORTEST_GRACE_SECONDS = 1
"""Grace period, in seconds, up to which a deletion request may not be the first one."""
_FIRST = "firstDeletion"
"""Key in the metadata of a stored pod: seconds since the epoch."""


def remember_deletion(pod: Manifest, known: Manifest | None) -> Manifest:
    """Return `pod` with the time of its first deletion request, copied from its previous state `known`."""
    if known is None or known["metadata"].get("uid") != pod["metadata"].get("uid"):
        return pod
    first = first_asked_at(known["metadata"])
    return pod if first is None else {**pod, "metadata": {**pod["metadata"], _FIRST: first}}


def first_asked_at(metadata: Manifest) -> float | None:
    """Return the time of the first deletion request, in seconds since the epoch, or None if it is unknown or there was no request."""
    if (first := metadata.get(_FIRST)) is not None:
        return float(first)
    return asked_at(metadata) if (metadata.get("deletionGracePeriodSeconds") or 0) > SHORTEST_GRACE_SECONDS else None


def asked_at(metadata: Manifest) -> float | None:
    """Return the time of the last deletion request with a shorter grace period, in seconds since the epoch, or None."""
    ends = seconds_of(metadata.get("deletionTimestamp"))
    return None if ends is None else ends - (metadata.get("deletionGracePeriodSeconds") or 0)
