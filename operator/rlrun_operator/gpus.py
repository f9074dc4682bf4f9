"""GPUs that a pod holds on its node: what is counted as one. Pure."""

from __future__ import annotations

from rlrun_operator.node_fit import requests_of
from rlrun_operator.state import Manifest

_SUFFIX, _PARTS = "/gpu", "/mig-"


def is_gpu(resource: str, named: str | None = None) -> bool:
    """True if a device of this resource counts as one GPU.

    Args:
        resource: name of an extended resource.
        named: the run's `placement.gpuResource`, whatever its name is.
    """
    return resource == named or resource.endswith(_SUFFIX) or _PARTS in resource


def gpus_of(spec: Manifest, named: str | None = None) -> int:
    """Number of GPUs that the scheduler counts for a pod; a part of one (MIG) counts as one device.

    Args:
        spec: of the pod.
        named: as of `is_gpu`.
    """
    return int(sum(amount for name, amount in requests_of(spec).items() if is_gpu(name, named)))


def resource_of(run: Manifest) -> str | None:
    """The resource that a run names for its GPUs; its specification may be malformed."""
    placement = (run.get("spec") or {}).get("placement")
    name = placement.get("gpuResource") if isinstance(placement, dict) else None
    return name if isinstance(name, str) and name else None
