"""Placement of a role's pods: node labels, tolerations and affinity from `spec.placement` and the role's block. Pure.

What placement asks for is added to what the role's block says; where both name the same node label, the block is nearer and wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.placement import RolePlacement
from rlrun.api.pods import PodFields
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun_operator.names import GPU_PRODUCT_LABEL, POOL_LABEL, ROLE_LABEL, RUN_LABEL, Role
from rlrun_operator.state import Json, Manifest, Placed

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue holds back pods and workloads of its own accord; a run's are admitted with the run."""
HOSTNAME = "kubernetes.io/hostname"
PREFERRED_WEIGHT = 100
"""Weight of `topology.preferred`; 100 is the most that Kubernetes knows."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def role_block(spec: RLRunSpec, role: Role) -> PodFields:
    """The role's part of the manifest."""
    blocks: dict[Role, PodFields] = {
        "trainer": spec.trainer,
        "inference": spec.inference,
        "orchestrator": spec.orchestrator,
    }
    return blocks[role]


def gpus_per_pod(spec: RLRunSpec, role: Role) -> int:
    """GPUs of each of the role's pods."""
    each: dict[Role, int] = {
        "trainer": spec.trainer.gpus_per_replica,
        "inference": spec.inference.gpus_per_replica,
        "orchestrator": 0,
    }
    return each[role]


def node_selector(spec: RLRunSpec, role: Role) -> dict[str, str]:
    """Labels that the role's nodes must have. The run's GPU product is meant for pods with GPUs, its pool for all."""
    overrides: dict[Role, RolePlacement] = {
        "trainer": spec.placement.trainer,
        "inference": spec.placement.inference,
        "orchestrator": spec.placement.orchestrator,
    }
    own = overrides[role]
    product = own.gpu_product or (spec.placement.gpu_product if gpus_per_pod(spec, role) else None)
    pool = own.pool or spec.placement.pool
    wanted = {GPU_PRODUCT_LABEL: product, POOL_LABEL: pool}
    return {key: value for key, value in wanted.items() if value} | role_block(spec, role).node_selector


def role_tolerations(spec: RLRunSpec, role: Role) -> list[Json]:
    """Taints that the role's pods bear: GPU nodes are commonly tainted with the name of their resource."""
    own = [{"key": spec.placement.gpu_resource, "operator": "Exists"}] if gpus_per_pod(spec, role) else []
    return own + [t.model_dump(by_alias=True, exclude_none=True) for t in role_block(spec, role).tolerations]


def role_affinity(
    spec: RLRunSpec, run: str, role: Role, *, beside: str | None = None, excluded: Sequence[str] = ()
) -> Json:
    """The role's affinity: the block's own, and what topology, spread and a volume for one node add to it.

    Args:
        spec: the run's specification.
        run: the run's name.
        role: the role.
        beside: run whose trainer's node this pod has to share: a guest's host with a volume for one node.
        excluded: names of nodes to keep away from.
    """
    result = role_block(spec, role).affinity.model_dump(by_alias=True, exclude_none=True)
    topology = spec.placement.topology
    near: tuple[Role, ...] = ("trainer",) if topology and topology.scope == "Role" else ("trainer", "inference")
    if topology is not None and role in near:
        if topology.required:
            _add_term(result, "podAffinity", _REQUIRED, _affinity_term(run, near, topology.required))
        if topology.preferred:
            term = _affinity_term(run, near, topology.preferred)
            _add_term(result, "podAffinity", _PREFERRED, {"weight": PREFERRED_WEIGHT, "podAffinityTerm": term})
    if beside is not None:
        _add_term(result, "podAffinity", _REQUIRED, _affinity_term(beside, ("trainer",), HOSTNAME))
    elif one_node(spec):
        # The trainer goes first: were the orchestrator to choose the node, it would choose one without GPUs. The
        # trainer of a later attempt follows the engines, which have stayed with the volume.
        first: tuple[Role, ...] = ("trainer", "inference") if role == "trainer" else ("trainer",)
        if spec.task not in TRAINING_TASKS:
            first = ("inference",)
        _add_term(result, "podAffinity", _REQUIRED, _affinity_term(run, first, HOSTNAME))
    if role == "inference" and spec.placement.spread_inference == "Required":
        # Anti-affinity and not a spread constraint: that one allows two engines on one node when no other qualifies.
        _add_term(result, "podAntiAffinity", _REQUIRED, _affinity_term(run, ("inference",), HOSTNAME))
    if excluded:
        _keep_away(result, excluded)
    return result


def topology_spread(spec: RLRunSpec, run: str, role: Role) -> list[dict[str, object]]:
    """Spread constraints of the role's pods: engines on different nodes where that is possible."""
    if role != "inference" or spec.placement.spread_inference != "Preferred" or one_node(spec):
        return []
    return [
        {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {RUN_LABEL: run, ROLE_LABEL: role}},
        }
    ]


def one_node(spec: RLRunSpec) -> bool:
    """True if the run's claim can be mounted on one node only, as far as the manifest shows."""
    template = spec.storage.template
    return template is not None and "ReadWriteMany" not in template.access_modes


def with_queue_fields(template: Manifest, placed: Placed) -> Json:
    """A pod template with what a queue adds; where both say something, the template's own stays (`find_contradiction` tells)."""
    metadata, spec = template["metadata"], dict(template["spec"])
    if placed.node_selector:
        spec["nodeSelector"] = {**placed.node_selector, **(spec.get("nodeSelector") or {})}
    own = list(spec.get("tolerations") or ())
    if more := [one for one in placed.tolerations if one not in own]:
        spec["tolerations"] = [*own, *more]
    if placed.scheduler:
        spec["schedulerName"] = placed.scheduler
    gates = list(spec.get("schedulingGates") or ())
    if placed.scheduling_gates:
        spec["schedulingGates"] = [*gates, *({"name": name} for name in placed.scheduling_gates)]
    return {
        **template,
        "metadata": {
            **metadata,
            "labels": {**placed.labels, **metadata["labels"]},
            "annotations": {**placed.annotations, **metadata["annotations"]},
        },
        "spec": spec,
    }


def find_contradiction(template: Manifest, placed: Placed, role: str) -> str:
    """First value of a pod template that a queue would have otherwise; empty: there is none."""
    metadata = template["metadata"]
    if QUEUE_LABEL in metadata["labels"]:
        return f"{role}.podTemplate.metadata.labels: remove {QUEUE_LABEL}: the run waits in the queue, not its pods"
    scheduler = template["spec"].get("schedulerName")
    if placed.scheduler and scheduler not in (None, placed.scheduler):
        return f"{role}: schedulerName is {scheduler}, and the queue's is {placed.scheduler}; remove it from the run"
    pairs = (
        ("nodeSelector", placed.node_selector, template["spec"].get("nodeSelector") or {}),
        ("label", placed.labels, metadata["labels"]),
        ("annotation", placed.annotations, metadata["annotations"]),
    )
    for what, theirs, own in pairs:
        for key, value in theirs.items():
            if own.get(key, value) != value:
                return f"{role}: {what} {key} is {own[key]}, and the admission says {value}; remove it from the run"
    return ""


def _affinity_term(run: str, roles: tuple[Role, ...], key: str) -> dict[str, object]:
    """Pods of the run's roles on nodes that agree in the label `key`."""
    if len(roles) == 1:
        selector: dict[str, object] = {"matchLabels": {RUN_LABEL: run, ROLE_LABEL: roles[0]}}
    else:
        among = {"key": ROLE_LABEL, "operator": "In", "values": list(roles)}
        selector = {"matchLabels": {RUN_LABEL: run}, "matchExpressions": [among]}
    return {"topologyKey": key, "labelSelector": selector}


def _keep_away(affinity: Json, nodes: Sequence[str]) -> None:
    """By name and not by the hostname label, which may differ. One of the terms has to hold, so the exclusion goes into each."""
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    required = affinity.setdefault("nodeAffinity", {}).setdefault(_REQUIRED, {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [term | {"matchFields": [*term.get("matchFields", ()), *away]} for term in terms]


def _add_term(affinity: Json, kind: str, strength: str, term: Json) -> None:
    affinity.setdefault(kind, {}).setdefault(strength, []).append(term)
