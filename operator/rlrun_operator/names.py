"""Names, labels and annotations of everything that the operator makes. No other module spells one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun.api.status import ATTEMPT_MAX
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
"""The run's name, as Kubernetes recommends. Argo CD's label tracking takes it for the name of an Application."""
SERVED_LEASE = "rlrun-operator-serves"
"""Lease in each namespace with runs: its holder looks after them. No run's own is called so: those end in `-progress`."""
RUN_LABEL = f"{GROUP}/run"
"""On every child; the operator's watches select by it."""
ROLE_LABEL = f"{GROUP}/role"
ATTEMPT_LABEL = f"{GROUP}/attempt"
"""On workloads and their pods: the attempt that they belong to, as a plain number. Inference carries that of its last rendering."""
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""On workloads: the spec that they were rendered from (`render.spec_hash`). Same attempt and hash: not rendered again, so that another
version of the operator touches nothing."""
RENDERING_ANNOTATION = f"{GROUP}/rendering"
"""On StatefulSet and Deployment: a mark of their pods as they were rendered. With another one the engines are renewed when an attempt
begins, and an attempt that lacks a pod is made again as a whole."""
CONFIG_ANNOTATION = f"{GROUP}/config"
"""On engines' pods: a mark of what they read in the configuration file, and of its format. On orchestrators: of the whole file, as it was
when the attempt began."""
RUN_UID_ANNOTATION = f"{GROUP}/run-uid"
"""On pods: the UID of their run. Names come back when a run is deleted and made again, and so do times of one second's resolution."""
RESTART_ANNOTATION = f"{GROUP}/restart-requested-at"
"""On an RLRun: its value, a time, asks for one restart."""
ROTATE_ANNOTATION = f"{GROUP}/rotate-key-requested-at"
"""On an RLRun: its value, a time, asks for another API key, with a restart."""
USE_NODES_ANNOTATION = f"{GROUP}/use-nodes-again-at"
"""On an RLRun: its value, a time, ends the exclusions of nodes that began before it."""
SPOT_LABEL = f"{GROUP}/spot"
"""On the Deployment of the spot engines and its pods, beside the role's label: their value is `true`."""
SPOT_NODES_ANNOTATION = f"{GROUP}/spot-nodes"
"""On that Deployment: a mark of the nodes that `inference.spot` named."""
SPOT_SET = "inference-spot"
"""Name of the spot engines among the pod sets of a queue; no role, as they are of the role inference."""
KEY_ANNOTATION = f"{GROUP}/key-attempt"
"""On workloads: the attempt whose beginning made the API key that they were rendered with; none: the run's first key."""
REPLICA_FAILURE = "ReplicaFailure"
"""Condition of a Deployment: its controller may not make a pod now."""
ACCESS_ANNOTATION = f"{GROUP}/api-server"
"""On orchestrators: a mark of the way to the API server that the run's policy was applied with when the attempt began."""
HOST_ANNOTATION = f"{GROUP}/host"
"""On a guest's orchestrator pod: uid and attempt of the host that it was made for (`host_mark`)."""
POOL_LABEL = f"{GROUP}/pool"
"""On nodes: `spec.placement.pool`."""
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"

FOLDER_CONTAINER, DEMONSTRATIONS_CONTAINER, MODEL_CONTAINER = "folder", "demonstrations", "model"
"""Init containers without which no role can start: they make the run's folder, what a tiny model's warm-up learns from, and that model."""

TRAINER_CHANNEL_PORT = 29600
RENDEZVOUS_PORT = 29500
INFERENCE_PORT = 8000
METRICS_PORT = 9100


@dataclass(frozen=True, order=True)
class Ref:
    """One object of the run's namespace."""

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
        """Deployment of the engines on interruptible nodes; the Service of `inference` is theirs, too."""
        return f"{self.inference}-spot"

    @property
    def account(self) -> str:
        """ServiceAccount, Role and RoleBinding of the orchestrator; ConfigMap and NetworkPolicy of the run."""
        return f"{self.run}-rlrun"

    def secret(self, uid: str, made_in: int = 0) -> str:
        """Secret with the run's API key. It is created and never read, so that of a deleted run must not be taken for it.

        Args:
            uid: of the run.
            made_in: the attempt that a later key was made for, which has a name of its own; 0: the run's first key.
        """
        first = f"{self.run}-key-{uid[:8]}"
        return f"{first}-{made_in}" if made_in else first

    @property
    def orchestrator_access(self) -> str:
        """NetworkPolicy of the orchestrator."""
        return f"{self.run}-egress"

    @property
    def reference_access(self) -> str:
        """NetworkPolicy that lets the trainer fetch from the hub what it alone reads, such as the reference model."""
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
        """Pod; one per attempt, so that a new one never waits for the old one's name."""
        return f"{self.run}-orchestrator-{attempt}"

    def trainer_pod(self, ordinal: int) -> str:
        """A pod of the StatefulSet."""
        return f"{self.trainer}-{ordinal}"


def child_labels(run: str, role: Role | None = None, attempt: int | None = None) -> dict[str, str]:
    """Labels of a child."""
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
    """Value of `HOST_ANNOTATION`: one life of a host's trainer."""
    return f"{uid}/{attempt}"


def run_uid_of(metadata: Manifest) -> str | None:
    """UID of the run that a pod belongs to, by its annotation or as its owner; None: it has neither, as those of older operators."""
    found = (metadata.get("annotations") or {}).get(RUN_UID_ANNOTATION)
    if found is None:
        owners = metadata.get("ownerReferences") or ()
        found = next((owner.get("uid") for owner in owners if owner.get("kind") == KIND), None)
    return str(found) if found is not None else None


def is_made_for(metadata: Manifest, run: str) -> bool:
    """True if a run of this name made an object, by its labels and what ties it to its run; any client may copy a label alone.

    An object that outlives its run (`build.metadata(owned=False)`) has the label alone.
    """
    if (metadata.get("labels") or {}).get(RUN_LABEL) != run:
        return False
    owners = metadata.get("ownerReferences") or ()
    if any((owner.get("kind"), owner.get("name")) == (KIND, run) for owner in owners):
        return True
    return RUN_UID_ANNOTATION in (metadata.get("annotations") or {})


def attempt_of(metadata: Mapping[str, object]) -> int | None:
    """The attempt that an object belongs to, by its label; None when it has none, or one that no attempt has."""
    return _read_number(metadata.get("labels"), ATTEMPT_LABEL)


def key_attempt_of(metadata: Mapping[str, object]) -> int:
    """The attempt whose key a workload was rendered with, by its annotation; 0: the run's first key."""
    return _read_number(metadata.get("annotations"), KEY_ANNOTATION) or 0


def attempt_number(text: object) -> int | None:
    """The number of an attempt as a label, an annotation or a message has it; None: any client may have written something else there."""
    if not isinstance(text, str) or not text.isdecimal() or len(text) > len(str(ATTEMPT_MAX)):
        return None
    return int(text)


def _read_number(found: object, name: str) -> int | None:
    return attempt_number(found.get(name) if isinstance(found, Mapping) else None)
