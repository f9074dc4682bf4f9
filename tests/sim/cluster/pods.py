"""Facts of an object of the cluster, read only from the object."""

from __future__ import annotations

from rlrun_operator.names import ROLE_LABEL
from tests.sim.cluster.api import Json


def owners(child: Json) -> set[str]:
    """Return the UIDs of an object's owners."""
    return {owner["uid"] for owner in child["metadata"].get("ownerReferences") or ()}


def is_up(pod: Json) -> bool:
    """Whether the pod's process works."""
    status = pod["status"]
    containers = status.get("containerStatuses") or ()
    holds = any("lastState" in c and pod["metadata"]["labels"][ROLE_LABEL] == "trainer" for c in containers)
    ended = holds or end_of(pod) is not None
    return (
        status["phase"] == "Running" and bool(containers) and not ended and "deletionTimestamp" not in pod["metadata"]
    )


def end_of(pod: Json) -> Json | None:
    """Return the final state of the role's container if it is not restarted."""
    entry = next(iter(pod["status"].get("containerStatuses") or ()), {})
    found: Json | None = (entry.get("state") or {}).get("terminated")
    return found


def has_started(pod: Json) -> bool:
    """Whether a container was ever started; one that waits for a Secret was not."""
    return any("waiting" not in (c.get("state") or {}) for c in pod["status"].get("containerStatuses") or ())


def key_of(pod: Json) -> str | None:
    """Return the Secret of the pod's API key."""
    environment = [variable for c in pod["spec"].get("containers") or () for variable in c.get("env") or ()]
    sources = [v["valueFrom"]["secretKeyRef"]["name"] for v in environment if "secretKeyRef" in v.get("valueFrom", {})]
    return next(iter(sources), None)


def has_sidecar(pod: Json) -> bool:
    """Whether an environment with a separate image runs next to the orchestrator, as in half of them; it ends later."""
    return int(str(pod["metadata"]["uid"]).rpartition("-")[2]) % 2 == 1
