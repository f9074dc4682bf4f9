"""Parts of objects that the cache keeps, and the times of a run's last signs of life.

The cache keeps the fields that decisions read: a third of a pod. All other fields would cost memory, and time in every parse.

The signs of life are the last renewal of a run's Lease and its last progress, by this operator's own clock and watch. A renewal proves that
the orchestrator is alive. Only a new attempt, step or activity proves progress of the run. Time in which the operator could not observe the
run counts for neither: after an outage, and after a gap between two renewals, the clock restarts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlrun.api.run_status import UNSERVED
from rlrun.protocol.messages import lease_annotations as keys
from rlrun_operator.kube.resources import EDITABLE_KINDS, PART_KINDS
from rlrun_operator.managed_fields import foreign_edits, held_fields
from rlrun_operator.names import GROUP, KIND, REPLICA_FAILURE
from rlrun_operator.state import Json, Manifest
from rlrun_operator.status.run_progress import HEARTBEAT_SECONDS

Select = Callable[[Manifest], Manifest]

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
)
_CONTAINER = ("name", "image", "resources", "restartPolicy")
_CONTAINER_STATUS = ("name", "image", "ready", "started", "restartCount", "state", "lastState")
_POD_STATUS = ("phase", "conditions", "reason", "message", "podIP", "startTime")
_OWN = f"{GROUP}/"


def slim_object(manifest: Manifest) -> Manifest:
    """Return an object without the fields that decisions never read; of a part only its metadata, and the fields that the operator owns.

    Only the operator's own annotations stay. `held` and `edits` of a workload are the results of `managed_fields`.
    """
    metadata = {name: manifest["metadata"][name] for name in _METADATA if name in manifest["metadata"]}
    annotations = metadata.get("annotations")
    if annotations:
        metadata["annotations"] = {name: value for name, value in annotations.items() if name.startswith(_OWN)}
    slim: Json = {"apiVersion": manifest.get("apiVersion"), "kind": manifest["kind"], "metadata": metadata}
    if manifest["kind"] in PART_KINDS:
        slim["held"] = _held_text(manifest)
        return slim
    if manifest["kind"] in EDITABLE_KINDS and (mine := _held_text(manifest)) != "null":
        slim["held"] = mine
        if found := manifest["edits"] if "edits" in manifest else foreign_edits(manifest):
            slim["edits"] = {path: list(edit) for path, edit in found.items()}
    select_spec, select_status = _SELECT.get(manifest["kind"], (_keep_all, _keep_all))
    if manifest.get("spec") is not None:
        slim["spec"] = select_spec(manifest["spec"])
    if manifest.get("status") is not None and not _is_unserved(manifest):
        slim["status"] = select_status(manifest["status"])
    return slim


def _held_text(manifest: Manifest) -> str:
    """Return the fields that the operator owns; a watch that slimmed the object has computed them already."""
    return sys.intern(manifest["held"]) if "held" in manifest else held_fields(manifest)


def _is_unserved(manifest: Manifest) -> bool:
    """Return whether an RLRun's status is the CRD's default, which no operator wrote: decisions treat it as empty."""
    status = manifest["status"]
    return manifest["kind"] == KIND and isinstance(status, Mapping) and status.get("phase") == UNSERVED["phase"]


def keep_identity(manifest: Manifest) -> Manifest:
    """Return `manifest` unchanged if its metadata identify an object.

    Raises:
        TypeError: name, UID or version is missing or not a string.
    """
    metadata = manifest["metadata"]
    for name in ("name", "uid", "resourceVersion"):
        if not isinstance(metadata.get(name), str):
            raise TypeError(f"metadata.{name} is {type(metadata.get(name)).__name__}")
    return manifest


def _keep_all(part: Manifest) -> Manifest:
    return part


def _keep_only(*names: str) -> Select:
    return lambda part: {name: part[name] for name in names if name in part}


def _pod_spec(spec: Manifest) -> Manifest:
    kept = {name: spec[name] for name in ("nodeName", "nodeSelector", "schedulingGates") if name in spec}
    if "nodeName" not in spec:  # only an unscheduled pod needs a diagnosis of its placement
        kept |= {name: spec[name] for name in ("tolerations", "affinity") if name in spec}
    for group in ("containers", "initContainers"):
        if spec.get(group):
            kept[group] = [{k: c[k] for k in _CONTAINER if k in c} for c in spec[group]]
    return kept


def _pod_status(status: Manifest) -> Manifest:
    kept = {name: status[name] for name in _POD_STATUS if name in status}
    for group in ("containerStatuses", "initContainerStatuses"):
        if status.get(group):
            kept[group] = [{k: c[k] for k in _CONTAINER_STATUS if k in c} for c in status[group]]
    return kept


def _deployment_status(status: Manifest) -> Manifest:
    failing = [c for c in status.get("conditions") or () if c.get("type") == REPLICA_FAILURE]
    conditions = [{name: c[name] for name in ("type", "status") if name in c} for c in failing]
    return {**_counts(status), "conditions": conditions} if conditions else _counts(status)


_counts = _keep_only("observedGeneration", "replicas")
_WORKLOAD = (_keep_only("replicas"), _counts)
"""Kept fields of workloads. The operator counts ready pods itself; a workload's own count would only cause more events."""
_SELECT: dict[str, tuple[Select, Select]] = {
    "Pod": (_pod_spec, _pod_status),
    "StatefulSet": _WORKLOAD,
    "Deployment": (_keep_only("replicas"), _deployment_status),
    "PersistentVolumeClaim": (
        _keep_only("storageClassName", "volumeName", "accessModes", "resources", "volumeMode"),
        _keep_only("phase", "conditions", "capacity"),
    ),
}


@dataclass(frozen=True)
class Pulse:
    """Times of one Lease, in seconds since the epoch."""

    renewed_at: float
    moved_at: float


def record_beat(before: Pulse | None, known: Manifest | None, lease: Manifest, now: float) -> Pulse:
    """Return the times after `lease` was observed.

    Args:
        before: previous pulse; None: first observation of a Lease of this name.
        known: previous state of the Lease.
        lease: current state of the Lease.
        now: seconds since the epoch.
    """
    if before is None or known is None:
        return Pulse(now, now)
    renewed, moved = _renewal_time(known) != _renewal_time(lease), _lease_marks(known) != _lease_marks(lease)
    unseen = renewed and now - before.renewed_at > HEARTBEAT_SECONDS
    return Pulse(now if renewed else before.renewed_at, now if moved or unseen else before.moved_at)


def _renewal_time(lease: Manifest) -> object:
    spec = lease.get("spec") or {}
    return spec.get("renewTime"), spec.get("holderIdentity")


def _lease_marks(lease: Manifest) -> object:
    found = lease["metadata"].get("annotations") or {}
    return tuple(found.get(key) for key in (keys.ATTEMPT, keys.STEP, keys.ACTIVITY))
