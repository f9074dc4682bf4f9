"""Names, labels and annotations of all objects that the operator creates. Other modules take them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun.api.run_status import ATTEMPT_MAX
from rlrun.runtime.json_types import Manifest

GROUP = "rlrun.io"
VERSION = "v1alpha1"
PLURAL = "rlruns"
KIND = "RLRun"
MANAGER = "rlrun-operator"
"""Field manager of every write, and `app.kubernetes.io/managed-by`."""

Role = Literal["trainer", "inference", "orchestrator"]
ROLES: tuple[Role, ...] = ("trainer", "inference", "orchestrator")

INSTANCE_LABEL = "app.kubernetes.io/instance"
"""The run's name, as Kubernetes recommends. Argo CD's label tracking reads it as the name of an Application."""
SERVED_LEASE = "rlrun-operator-serves"
"""Lease in each namespace with runs: its holder serves them. Leases of runs end in `-progress`, so the names cannot collide."""
RUN_LABEL = f"{GROUP}/run"
"""On every child; the operator's watches select by it."""
ROLE_LABEL = f"{GROUP}/role"
ATTEMPT_LABEL = f"{GROUP}/attempt"
"""On workloads and their pods: number of their attempt. Inference has the attempt of its last rendering."""
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""On workloads: hash of the spec that they were rendered from (`render.spec_hash`). With an unchanged attempt and hash the operator does
not render again, so that another operator version does not change running workloads."""
RENDERING_ANNOTATION = f"{GROUP}/rendering"
"""On StatefulSet and Deployment: hash of their rendered pods. If it differs, the next attempt renews the engines, and an attempt that lacks
a pod is created again as a whole."""
CONFIG_ANNOTATION = f"{GROUP}/config"
"""On engine pods: hash of the engine's part of the configuration file, and of its format. On orchestrators: hash of the whole file at the
start of the attempt."""
RUN_UID_ANNOTATION = f"{GROUP}/run-uid"
"""On pods: UID of their run. A deleted and recreated run has the same name, and times have a resolution of one second."""
RESTART_ANNOTATION = f"{GROUP}/restart-requested-at"
"""On an RLRun: a time; each new value requests one restart."""
ROTATE_ANNOTATION = f"{GROUP}/rotate-key-requested-at"
"""On an RLRun: a time; each new value requests another API key, with a restart."""
USE_NODES_ANNOTATION = f"{GROUP}/use-nodes-again-at"
"""On an RLRun: a time; it ends all exclusions of nodes that started before it."""
SPOT_LABEL = f"{GROUP}/spot"
"""On the Deployment of the spot engines and its pods, in addition to the role's label; its value is `true`."""
SPOT_NODES_ANNOTATION = f"{GROUP}/spot-nodes"
"""On that Deployment: hash of the nodes that `inference.spot` selects."""
SPOT_SET = "inference-spot"
"""Name of the spot engines among the pod sets of a queue; it is not a role, since spot engines have the role inference."""
KEY_ANNOTATION = f"{GROUP}/key-attempt"
"""On workloads: attempt whose start created the API key in their rendering; absent for the run's first key."""
REPLICA_FAILURE = "ReplicaFailure"
"""Condition of a Deployment whose controller cannot create a pod."""
ACCESS_ANNOTATION = f"{GROUP}/api-server"
"""On orchestrators: hash of the API server's addresses in the run's policy at the start of the attempt."""
HOST_ANNOTATION = f"{GROUP}/host"
"""On a guest's orchestrator pod: UID and attempt of its host (`host_mark`)."""
POOL_LABEL = f"{GROUP}/pool"
"""On nodes: `spec.placement.pool`."""
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"

FOLDER_CONTAINER, DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER = "folder", "demonstrations", "model"
"""Init containers without which no role can start: they create the run's folder, the data of a tiny model's warm-up, and that model."""


@dataclass(frozen=True, order=True)
class Ref:
    """Reference to an object in the run's namespace."""

    kind: str
    name: str


@dataclass(frozen=True)
class Names:
    """Names of a run's children."""

    run: str

    @property
    def trainer(self) -> str:
        """StatefulSet and its headless Service."""
        return f"{self.run}-trainer"

    @property
    def inference(self) -> str:
        """Deployment and its headless Service."""
        return f"{self.run}-inference"

    @property
    def spot(self) -> str:
        """Deployment of the engines on interruptible nodes; they share the Service of `inference`."""
        return f"{self.inference}-spot"

    @property
    def account(self) -> str:
        """ServiceAccount, Role and RoleBinding of the orchestrator; ConfigMap and NetworkPolicy of the run."""
        return f"{self.run}-rlrun"

    def key_secret(self, uid: str, made_in: int = 0) -> str:
        """Secret with the run's API key. The operator creates it and never reads it, so a new run must not reuse a deleted run's name.

        Args:
            uid: UID of the run.
            made_in: attempt for which a later key was created, as part of the name; 0: the run's first key.
        """
        first = f"{self.run}-key-{uid[:8]}"
        return f"{first}-{made_in}" if made_in else first

    @property
    def orchestrator_access(self) -> str:
        """NetworkPolicy of the orchestrator."""
        return f"{self.run}-egress"

    @property
    def reference_access(self) -> str:
        """NetworkPolicy that lets the trainer download its own files from the hub, such as the reference model."""
        return f"{self.run}-reference"

    @property
    def host_access(self) -> str:
        """NetworkPolicy of a guest that lets its orchestrator reach the host's trainer and engines."""
        return f"{self.run}-host-access"

    @property
    def claim(self) -> str:
        """PersistentVolumeClaim made from `storage.claimTemplate`."""
        return f"{self.run}-data"

    @property
    def progress(self) -> str:
        """Lease that the orchestrator renews."""
        return f"{self.run}-progress"

    def orchestrator(self, attempt: int) -> str:
        """Orchestrator pod of an attempt; each attempt has its own name, so that a new pod never waits for the old one to end."""
        return f"{self.run}-orchestrator-{attempt}"

    def trainer_pod(self, ordinal: int) -> str:
        """Pod of the StatefulSet."""
        return f"{self.trainer}-{ordinal}"


def child_labels(run: str, role: Role | None = None, attempt: int | None = None) -> dict[str, str]:
    """Return the labels of a child."""
    result = {
        "app.kubernetes.io/name": "rlrun",
        INSTANCE_LABEL: run,
        "app.kubernetes.io/managed-by": MANAGER,
        RUN_LABEL: run,
    }
    if role is not None:
        result |= {"app.kubernetes.io/component": role, ROLE_LABEL: role}
    if attempt is not None:
        result[ATTEMPT_LABEL] = str(attempt)
    return result


def host_mark(uid: str, attempt: int) -> str:
    """Return the value of `HOST_ANNOTATION`, which identifies one attempt of a host's trainer."""
    return f"{uid}/{attempt}"


def run_uid_of(metadata: Manifest) -> str | None:
    """Return the UID of a pod's run, by annotation or owner, or None for pods of older operators without either."""
    found = (metadata.get("annotations") or {}).get(RUN_UID_ANNOTATION)
    if found is None:
        owners = metadata.get("ownerReferences") or ()
        found = next((owner.get("uid") for owner in owners if owner.get("kind") == KIND), None)
    return str(found) if found is not None else None


def is_made_for(metadata: Manifest, run: str) -> bool:
    """Return whether a run of this name created an object, by its label and its owner or UID; any client may copy the label.

    An object that outlives its run (`build.metadata(owned=False)`) has only the label, so the result is False.
    """
    if (metadata.get("labels") or {}).get(RUN_LABEL) != run:
        return False
    owners = metadata.get("ownerReferences") or ()
    if any((owner.get("kind"), owner.get("name")) == (KIND, run) for owner in owners):
        return True
    return RUN_UID_ANNOTATION in (metadata.get("annotations") or {})


def attempt_of(metadata: Mapping[str, object]) -> int | None:
    """Return the attempt in an object's label, or None if the label is missing or invalid."""
    return _read_number(metadata.get("labels"), ATTEMPT_LABEL)


def key_attempt_of(metadata: Mapping[str, object]) -> int:
    """Return the attempt whose key a workload uses, by its annotation; 0 for the run's first key."""
    return _read_number(metadata.get("annotations"), KEY_ANNOTATION) or 0


def attempt_number(text: object) -> int | None:
    """Return the number of an attempt in a label, annotation or message, or None if the text is invalid; any client may have written it."""
    if not isinstance(text, str) or not text.isdecimal() or len(text) > len(str(ATTEMPT_MAX)):
        return None
    return int(text)


def _read_number(found: object, name: str) -> int | None:
    return attempt_number(found.get(name) if isinstance(found, Mapping) else None)
