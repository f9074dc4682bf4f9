"""Number of GPUs that a pod occupies on its node. Pure."""

from __future__ import annotations

from rlrun_operator.node_fit import requests_of
from rlrun_operator.state import Manifest

_SUFFIX, _PARTS = "/gpu", "/mig-"


def is_gpu(resource: str, named: str | None = None) -> bool:
    """Return whether a device of this resource counts as one GPU.

    Args:
        resource: name of an extended resource.
        named: value of the run's `placement.gpuResource`, which always counts.
    """
    return resource == named or resource.endswith(_SUFFIX) or _PARTS in resource


def gpus_of(spec: Manifest, named: str | None = None) -> int:
    """Return the number of GPUs that the scheduler counts for a pod; a MIG slice counts as one.

    Args:
        spec: specification of the pod.
        named: value of the run's `placement.gpuResource`.
    """
    return int(sum(amount for name, amount in requests_of(spec).items() if is_gpu(name, named)))


def resource_of(run: Manifest) -> str | None:
    """Return the GPU resource that a run names, or None; its specification may be malformed."""
    placement = (run.get("spec") or {}).get("placement")
    name = placement.get("gpuResource") if isinstance(placement, dict) else None
    return name if isinstance(name, str) and name else None
