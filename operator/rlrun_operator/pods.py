"""Pods as decisions read them: the time of their deletion, their state, and the GPUs that they hold. Pure.

Kubernetes does not keep the time at which a deletion was first requested. `deletionTimestamp` minus the grace period is the time of the
last request with a shorter grace period, and the kubelet itself sends such a request, with a grace period of 0, once all containers have
ended. A process that only obeyed the first request would then seem to have ended before any request. Therefore the operator's cache keeps
the first observed request with the pod.

The API's nested JSON of a pod is read once into the plain values of `Pod`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from rlrun_operator.names import ROLE_LABEL, ROLES, RUN_LABEL, SPOT_LABEL, Names, Ref, Role, attempt_of, run_uid_of
from rlrun_operator.node_fit import requests_of
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


_NEVER_RAN = ("StartError", "ContainerCannotRun")
"""Termination reasons of containers that the runtime could not start."""


@dataclass(frozen=True)
class Exit:
    """End of a container's process."""

    code: int
    reason: str
    """Kubernetes' reason, such as OOMKilled or Error."""
    message: str
    """Termination message of the role."""
    at: float | None
    """Seconds since the epoch, by the node's clock."""


@dataclass(frozen=True)
class Container:
    """One container of a pod."""

    name: str
    init: bool
    image: str
    running: bool
    ready: bool
    restarts: int
    waiting_reason: str
    """Reason for which the container waits; empty if it does not."""
    waiting_message: str
    exit: Exit | None
    """Current or previous end: the trainer's exit wrapper waits after a failure, so a failed container may be running again."""


@dataclass(frozen=True)
class Pod:
    """One pod of a run."""

    ref: Ref
    uid: str
    role: Role
    attempt: int
    node: str | None
    phase: str
    reason: str
    """Reason in the pod's status, such as Evicted; usually empty."""
    message: str
    created_at: float
    deleted_at: float | None
    """Time at which the deletion was requested, by the API server's clock, or None."""
    deletion_seen: bool
    """Whether `deleted_at` is the time of the first request; otherwise an earlier request is possible."""
    ready: bool
    mounted: bool
    """Whether volumes and sandbox are ready; earlier mount errors of the kubelet are then obsolete."""
    disruption: tuple[str, str] | None
    """Reason and message of the condition DisruptionTarget, if true."""
    unscheduled: tuple[str, str] | None
    """Reason and message of the condition PodScheduled, if false."""
    containers: tuple[Container, ...]
    """Containers, with init containers first."""
    manifest: Manifest
    spot: bool = False
    """Whether it is an engine on an interruptible node, whose loss is not a failure."""

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def kubectl_argument(self) -> str:
        """Arguments that name the pod on kubectl's command line, with its namespace."""
        namespace = self.manifest["metadata"].get("namespace")
        return self.ref.name + (f" -n {namespace}" if namespace else "")

    @property
    def main(self) -> Container | None:
        """The role's own container, which has the role's name."""
        return next((c for c in self.containers if c.name == self.role and not c.init), None)

    @property
    def exit(self) -> Exit | None:
        """End of the role's own container."""
        return self.main.exit if self.main else None

    @property
    def has_run(self) -> bool:
        """Whether a process of the pod runs or has run. A container whose command is missing in its image ends without a process."""
        return any(c.running or (c.exit is not None and c.exit.reason not in _NEVER_RAN) for c in self.containers)

    @property
    def has_started(self) -> bool:
        """Whether the role's own container runs or has run."""
        return self.main is not None and (self.main.running or self.main.exit is not None)

    @property
    def exited_cleanly(self) -> bool:
        """Whether the role's own container ended with exit code 0."""
        return self.exit is not None and self.exit.code == 0

    def ended_by_itself(self, end: Exit) -> bool:
        """Return whether the pod ended before its deletion was requested; within one second, Kubernetes' resolution, it did not."""
        return self.deleted_at is None or (self.deletion_seen and end.at is not None and end.at < self.deleted_at)

    @property
    def keeps_running(self) -> bool:
        """Whether the pod keeps running unless it is deleted. An ended orchestrator does not, although sidecars keep its phase Running."""
        ended = self.role == "orchestrator" and self.exit is not None
        return self.deleted_at is None and self.phase not in ("Succeeded", "Failed") and not ended


def read_pods(manifests: Iterable[Manifest], *, uid: str, born_after: float) -> tuple[list[Pod], list[Pod]]:
    """Return the run's own pods, and pods that an earlier run of the same name left.

    Args:
        manifests: all pods with the run's label.
        uid: UID of the run.
        born_after: creation time of the run, in seconds since the epoch. It decides about pods of older operators, which do not name the
            UID of their run: the run's own pods cannot be older than the run.
    """
    own: list[Pod] = []
    others: list[Pod] = []
    for manifest in manifests:
        if (pod := _read_pod(manifest)) is not None:
            run_uid = run_uid_of(manifest["metadata"])
            if run_uid is None and not manifest["metadata"].get("ownerReferences"):
                continue  # created by hand, not for a run
            is_own = pod.created_at >= born_after if run_uid is None else run_uid == uid
            (own if is_own else others).append(pod)
    return own, others


def _read_pod(manifest: Manifest) -> Pod | None:
    metadata, spec, status = (manifest.get(part) or {} for part in ("metadata", "spec", "status"))
    role = (metadata.get("labels") or {}).get(ROLE_LABEL)
    if role not in ROLES or not _is_original(metadata, cast(Role, role)):
        return None
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    first = first_asked_at(metadata)
    return Pod(
        ref=Ref("Pod", _read_text(metadata, "name")),
        uid=_read_text(metadata, "uid"),
        role=cast(Role, role),
        attempt=attempt_of(metadata) or 0,
        node=spec.get("nodeName"),
        phase=str(status.get("phase", "Pending")),
        reason=_read_text(status, "reason"),
        message=_read_text(status, "message"),
        created_at=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        deleted_at=first if first is not None else asked_at(metadata),
        deletion_seen=first is not None,
        ready=_condition_is(conditions, "Ready", "True"),
        mounted=_condition_is(conditions, "PodReadyToStartContainers", "True"),
        disruption=_read_condition(conditions, "DisruptionTarget", "True"),
        unscheduled=_read_condition(conditions, "PodScheduled", "False"),
        containers=_reported_containers(spec, status),
        manifest=manifest,
        spot=role == "inference" and SPOT_LABEL in (metadata.get("labels") or {}),
    )


def _is_original(metadata: Manifest, role: Role) -> bool:
    """Return whether a pod has the name of its role's pods: a copy of a pod has the same labels and another name."""
    name, labels = str(metadata.get("name", "")), metadata.get("labels") or {}
    names, attempt = Names(str(labels.get(RUN_LABEL, ""))), attempt_of(metadata)
    if role == "inference":
        return name.startswith(f"{names.inference}-")
    if role == "orchestrator" and attempt is not None:
        return name == names.orchestrator(attempt)
    start, _, number = name.rpartition("-")
    return number.isdecimal() and start == (names.trainer if role == "trainer" else f"{names.run}-orchestrator")


def _read_text(block: Manifest, name: str) -> str:
    return str(block.get(name) or "")


def _reported_containers(spec: Manifest, status: Manifest) -> tuple[Container, ...]:
    """Return the containers that the kubelet reports, with the images of the specification."""
    specified = [c for part in ("initContainers", "containers") for c in spec.get(part) or ()]
    images = {c.get("name"): c.get("image", "") for c in specified}
    return tuple(
        _read_container(container, part.startswith("init"), images)
        for part in ("initContainerStatuses", "containerStatuses")
        for container in status.get(part) or ()
    )


def _read_container(status: Manifest, init: bool, images: Mapping[str, str]) -> Container:
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    name = str(status.get("name", ""))
    return Container(
        name=name,
        init=init,
        image=str(images.get(name) or status.get("image") or ""),
        running="running" in state,
        ready=bool(status.get("ready")),
        restarts=int(status.get("restartCount") or 0),
        waiting_reason=_read_text(waiting, "reason"),
        waiting_message=_read_text(waiting, "message"),
        exit=_container_exit(state, status.get("lastState") or {}),
    )


def _container_exit(state: Manifest, last: Manifest) -> Exit | None:
    """Return the last failed end of a container, or its last end: a later clean end must not hide a failure."""
    ends = [end for part in (state, last) if (end := part.get("terminated"))]
    if not ends:
        return None
    ended = next((end for end in ends if end.get("exitCode")), ends[0])
    return Exit(
        int(ended.get("exitCode") or 0),
        _read_text(ended, "reason"),
        _read_text(ended, "message").strip(),
        seconds_of(ended.get("finishedAt")),
    )


def _condition_is(conditions: Mapping[str, Manifest], kind: str, status: str) -> bool:
    return bool((conditions.get(kind) or {}).get("status") == status)


def _read_condition(conditions: Mapping[str, Manifest], kind: str, status: str) -> tuple[str, str] | None:
    if not _condition_is(conditions, kind, status):
        return None
    found = conditions[kind]
    return str(found.get("reason") or ""), str(found.get("message") or "")


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
