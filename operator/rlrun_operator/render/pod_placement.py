"""Placement of a role's pods: node labels, tolerations and affinity from `spec.placement` and the role's block. Pure.

The fields of placement are added to those of the role's block; if both set the same node label, the block wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.pod_fields import PodFields
from rlrun.api.pod_placement import RolePlacement
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun_operator.names import GPU_PRODUCT_LABEL, POOL_LABEL, ROLE_LABEL, RUN_LABEL, Role
from rlrun_operator.state import Json, Manifest, Placed

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue suspends single pods and workloads; those of a run are admitted with the run."""
HOSTNAME = "kubernetes.io/hostname"
PREFERRED_WEIGHT = 100
"""Weight of `topology.preferred`; 100 is the maximum of Kubernetes."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def role_block(spec: RLRunSpec, role: Role) -> PodFields:
    """Return the role's block of the specification."""
    blocks: dict[Role, PodFields] = {
        "trainer": spec.trainer,
        "inference": spec.inference,
        "orchestrator": spec.orchestrator,
    }
    return blocks[role]


def gpus_per_pod(spec: RLRunSpec, role: Role) -> int:
    """Return the number of GPUs of each of the role's pods."""
    each: dict[Role, int] = {
        "trainer": spec.trainer.gpus_per_replica,
        "inference": spec.inference.gpus_per_replica,
        "orchestrator": 0,
    }
    return each[role]


def node_selector(spec: RLRunSpec, role: Role) -> dict[str, str]:
    """Return the labels that the role's nodes must have. The run's GPU product applies to pods with GPUs, its pool to all pods."""
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
    """Return the role's affinity: that of its block, with the terms of topology, spread and a volume for one node.

    Args:
        spec: specification of the run.
        run: name of the run.
        role: role of the pods.
        beside: run whose trainer must be on the same node: a guest's host with a volume for one node.
        excluded: names of nodes that must not be used.
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
        # The trainer is scheduled first, because an orchestrator could select a node without GPUs. The trainer of a later attempt
        # follows the engines, which have stayed at the volume.
        first: tuple[Role, ...] = ("trainer", "inference") if role == "trainer" else ("trainer",)
        if spec.task not in TRAINING_TASKS:
            first = ("inference",)
        _add_term(result, "podAffinity", _REQUIRED, _affinity_term(run, first, HOSTNAME))
    if role == "inference" and spec.placement.spread_inference == "Required":
        # Anti-affinity, because a spread constraint allows two engines on one node if no other node qualifies.
        _add_term(result, "podAntiAffinity", _REQUIRED, _affinity_term(run, ("inference",), HOSTNAME))
    if excluded:
        _keep_away(result, excluded)
    return result


def topology_spread(spec: RLRunSpec, run: str, role: Role) -> list[dict[str, object]]:
    """Return the spread constraints of the role's pods: engines on different nodes if possible."""
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
    """Return whether the run's claim can only be mounted on one node, according to the specification."""
    template = spec.storage.template
    return template is not None and "ReadWriteMany" not in template.access_modes


def with_queue_fields(template: Manifest, placed: Placed) -> Json:
    """Return a pod template with the additions of a queue; values of the template win (see `find_contradiction`)."""
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
    """Return the first value of a pod template that contradicts the additions of a queue; empty if they agree."""
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
                return f"{role}: {what} {key} is {own[key]}, and the admission has {value}; remove it from the run"
    return ""


def _affinity_term(run: str, roles: tuple[Role, ...], key: str) -> dict[str, object]:
    """Return the affinity term for pods of these roles on nodes with the same value of the label `key`."""
    if len(roles) == 1:
        selector: dict[str, object] = {"matchLabels": {RUN_LABEL: run, ROLE_LABEL: roles[0]}}
    else:
        among = {"key": ROLE_LABEL, "operator": "In", "values": list(roles)}
        selector = {"matchLabels": {RUN_LABEL: run}, "matchExpressions": [among]}
    return {"topologyKey": key, "labelSelector": selector}


def _keep_away(affinity: Json, nodes: Sequence[str]) -> None:
    """Exclude nodes by name, because the hostname label may differ. One of the terms must match, so each term gets the exclusion."""
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    required = affinity.setdefault("nodeAffinity", {}).setdefault(_REQUIRED, {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [term | {"matchFields": [*term.get("matchFields", ()), *away]} for term in terms]


def _add_term(affinity: Json, kind: str, strength: str, term: Json) -> None:
    affinity.setdefault(kind, {}).setdefault(strength, []).append(term)
