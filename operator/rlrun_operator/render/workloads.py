"""Workloads of an attempt and their pod templates: trainer StatefulSet, engine Deployments, orchestrator Pod.

A template contains the fields that all pods have in common and the placement. The role's `podTemplate` is merged last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlrun.api.kubernetes_types import KEY_VARIABLE, is_reserved
from rlrun.api.pod_fields import SpotSpec
from rlrun.config.models.file_mark import NOT_READ_BY_ENGINES
from rlrun_operator.names import (
    ACCESS_ANNOTATION,
    CONFIG_ANNOTATION,
    HOST_ANNOTATION,
    KEY_ANNOTATION,
    RENDERING_ANNOTATION,
    ROLE_LABEL,
    ROLES,
    RUN_LABEL,
    RUN_UID_ANNOTATION,
    SPEC_HASH_ANNOTATION,
    SPOT_LABEL,
    SPOT_NODES_ANNOTATION,
    SPOT_SET,
    Role,
    child_labels,
    host_mark,
)
from rlrun_operator.render import container_parts, environments, pod_placement, role_containers
from rlrun_operator.render.render_context import RunContext, child_metadata, config_format, document_mark
from rlrun_operator.render.strategic_merge import merge_patch
from rlrun_operator.state import Json, Manifest

TOKEN_SECONDS = 3600
"""Lifetime of the orchestrator's token; the kubelet renews it in time."""
ENGINE_GRACE_SECONDS = 15
"""Seconds between SIGTERM and SIGKILL of an engine, which has nothing to save."""
MARGIN_SECONDS = 10
"""Seconds that the other roles get in addition to `checkpoint.gracePeriodSeconds`, so that they end by themselves and report the cause."""


def pod_template(ctx: RunContext, role: Role) -> Json:
    """Return metadata (labels, annotations) and spec of a role's pods, with the additions of a queue's admission."""
    made = own_template(ctx, role)
    return pod_placement.with_queue_fields(made, ctx.placed[role]) if role in ctx.placed else made


def spot_template(ctx: RunContext, block: SpotSpec) -> Json:
    """Return metadata and spec of the spot engines' pods: an engine on the nodes of `inference.spot`, which overrides other node fields."""
    made = _on_spot(ctx, block)
    return pod_placement.with_queue_fields(made, ctx.placed[SPOT_SET]) if SPOT_SET in ctx.placed else made


def _on_spot(ctx: RunContext, block: SpotSpec) -> Json:
    made = own_template(ctx, "inference")
    metadata, spec = made["metadata"], made["spec"]
    # Clouds taint interruptible nodes with the key of their label.
    tolerations = [{"key": key, "operator": "Exists"} for key in block.node_selector]
    spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **block.node_selector}
    spec["tolerations"] = [*(spec.get("tolerations") or ()), *tolerations]
    return {**made, "metadata": {**metadata, "labels": {**metadata["labels"], SPOT_LABEL: "true"}}}


def queue_conflicts(ctx: RunContext) -> str:
    """Return the contradictions between the run's pods and the additions of a queue; empty if they agree."""
    found = [
        pod_placement.find_contradiction(own_template(ctx, role), ctx.placed[role], role)
        for role in ROLES
        if role in ctx.placed
    ]
    block = ctx.spec.inference.spot
    if block is not None and SPOT_SET in ctx.placed:
        found.append(pod_placement.find_contradiction(_on_spot(ctx, block), ctx.placed[SPOT_SET], "inference.spot"))
    return "; ".join(text for text in found if text)


def own_template(ctx: RunContext, role: Role) -> Json:
    """Return metadata (labels, annotations) and spec of a role's pods without the additions of a queue.

    The user's `podTemplate` overrides all fields except those by which the operator finds and judges pods: its labels, the restart policy,
    the container with the role's name, and the reserved variables, which identify a process. Only the labels and annotations of its
    metadata are used. A key that a PodTemplateSpec does not have is kept, so that the API server's dry run refuses it and names it.
    """
    patch = pod_placement.role_block(ctx.spec, role).pod_template
    container = role_containers.role_container(ctx, role)
    spec = _pod_spec(ctx, role, container)
    restart = spec["restartPolicy"]
    merged = _merge_template(spec, patch.get("spec"))
    merged["restartPolicy"] = restart
    merged["containers"] = _with_role(merged.get("containers"), container)
    for kind in ("containers", "initContainers"):
        if kind in merged:
            merged[kind] = _with_own_variables(merged[kind], [container, *spec["initContainers"]])
    rest = {key: value for key, value in patch.items() if key not in ("metadata", "spec")}
    return rest | {"metadata": _pod_metadata(ctx, role, patch.get("metadata")), "spec": merged}


def _grace_seconds(ctx: RunContext, role: Role) -> int:
    return ENGINE_GRACE_SECONDS if role == "inference" else ctx.spec.checkpoint.grace_period_seconds + MARGIN_SECONDS


def _merge_template(spec: dict[str, object], wanted: object) -> Json:
    """Return the spec merged with the user's. A value other than a map is set as an unknown field, so that the API server's refusal
    names it."""
    if wanted is None:
        return spec
    return merge_patch(spec, wanted) if isinstance(wanted, Mapping) else {**spec, "podTemplate.spec": wanted}


def _pod_spec(ctx: RunContext, role: Role, container: dict[str, object]) -> Json:
    own = pod_placement.role_block(ctx.spec, role)
    spec: dict[str, object] = {
        "restartPolicy": "Never" if role == "orchestrator" else "Always",
        "terminationGracePeriodSeconds": _grace_seconds(ctx, role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": container_parts.pod_context(assigned=ctx.settings.assigned_users),
    }
    if role == "orchestrator":
        spec["serviceAccountName"] = ctx.names.account
    first: list[dict[str, object]] = [role_containers.folder_container(ctx, role)]
    if role == ctx.model_maker:
        first += role_containers.demonstrations_container(ctx, role)
        first.append(role_containers.model_container(ctx, role))
    if role == "orchestrator":
        first += environments.environment_containers(ctx)
        first += role_containers.environments_container(ctx)
    spec |= {"initContainers": first, "containers": [container], "volumes": _pod_volumes(ctx, role)}
    optional = {
        "nodeSelector": pod_placement.node_selector(ctx.spec, role),
        "tolerations": pod_placement.role_tolerations(ctx.spec, role),
        "affinity": pod_placement.role_affinity(
            ctx.spec, ctx.name, role, beside=_host_affinity(ctx), excluded=() if role == "inference" else ctx.excluded
        ),
        "topologySpreadConstraints": pod_placement.topology_spread(ctx.spec, ctx.name, role),
        "imagePullSecrets": [{"name": secret.name} for secret in own.image_pull_secrets],
        "priorityClassName": own.priority_class_name,
        "runtimeClassName": own.runtime_class_name,
    }
    return spec | {field: value for field, value in optional.items() if value}


def _host_affinity(ctx: RunContext) -> str | None:
    """Return the name of the host if its claim can only be mounted on one node."""
    return ctx.host.name if ctx.host is not None and pod_placement.one_node(ctx.host.spec) else None


def _pod_volumes(ctx: RunContext, role: Role) -> list[Json]:
    memory: Json = {"medium": "Memory"}
    limit = pod_placement.role_block(ctx.spec, role).shared_memory
    if limit is not None:
        memory["sizeLimit"] = limit
    volumes: list[Json] = [
        {"name": container_parts.DATA, "persistentVolumeClaim": {"claimName": ctx.claim}},
        {"name": role_containers.CONFIG, "configMap": {"name": ctx.names.account}},
        {"name": role_containers.SHARED_MEMORY, "emptyDir": memory},
        *({"name": name, "emptyDir": {"sizeLimit": role_containers.SCRATCH_LIMIT}} for name in role_containers.SCRATCH),
    ]
    if role == ctx.model_maker:
        volumes += environments.demonstrations_volumes(ctx)
    if role == "orchestrator":
        token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}}
        ca = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
        volumes.append({"name": role_containers.CREDENTIALS, "projected": {"sources": [token, ca]}})
        volumes += environments.environment_volumes(ctx)
        volumes += environments.shared_volumes(ctx, scratch_limit=role_containers.SCRATCH_LIMIT)
    return volumes


def _pod_metadata(ctx: RunContext, role: Role, patch: object) -> Json:
    """Merge the user's metadata with the operator's, which take precedence, because the operator finds pods by them. Engines have no
    attempt, because they outlive attempts."""
    user = patch if isinstance(patch, Mapping) else {}
    ours = child_labels(ctx.name, role, None if role == "inference" else ctx.attempt)
    annotations = {RUN_UID_ANNOTATION: ctx.uid}
    if role == "inference":  # only engines outlive the attempt that wrote the file
        engine = ctx.config.inference
        read = engine.model_dump(mode="json", exclude=set(NOT_READ_BY_ENGINES)) if engine is not None else None
        annotations[CONFIG_ANNOTATION] = document_mark([config_format(), read])
    elif role == "orchestrator":
        annotations[CONFIG_ANNOTATION] = ctx.file_mark(role)
    return {
        "labels": merge_patch(_as_mapping(user.get("labels")), ours),
        "annotations": merge_patch({}, _as_mapping(user.get("annotations"))) | annotations,
    }


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _with_own_variables(found: object, made: Sequence[Json]) -> object:
    """Return the containers; the rendered ones get the operator's values of the reserved variables."""
    if not isinstance(found, list):
        return found
    ours = {container["name"]: container["env"] for container in made if "env" in container}
    return [
        {**one, "env": _reserved_as_made(one.get("env"), ours[str(one.get("name"))])}
        if isinstance(one, Mapping) and one.get("name") in ours
        else one
        for one in found
    ]


def _reserved_as_made(found: object, made: Sequence[Json]) -> object:
    """Return the variables of a container with all reserved ones as rendered. Only the run's key may come from the user."""
    if found is not None and not isinstance(found, list):
        return found  # the API server's dry run reports the field
    ours = {variable["name"]: variable for variable in made if is_reserved(variable["name"])}
    result = []
    for variable in found or ():
        name = str(variable.get("name")) if isinstance(variable, Mapping) else ""
        if not is_reserved(name) or name == KEY_VARIABLE:
            result.append(variable)
        elif name in ours:
            result.append(ours[name])
        ours.pop(name, None)
    return [*result, *ours.values()]


def _with_role(found: object, container: dict[str, object]) -> object:
    """Return the containers, including the role's container."""
    if not isinstance(found, list):
        return found if found is not None else [container]
    there = any(isinstance(one, Mapping) and one.get("name") == container["name"] for one in found)
    return found if there else [container, *found]


NO_DEADLINE_SECONDS = 2**31 - 1
"""Deadline of Deployments, practically unlimited: it would only add status writes, and the operator limits starts itself."""
KEPT_REVISIONS = 1
"""Number of old revisions; a rendering is never rolled back."""


class Workloads(NamedTuple):
    """Workloads of an attempt."""

    trainer: Manifest | None
    """None for guests, which use the host's trainer, and for evaluations."""
    inference: Manifest | None
    """None for supervised fine-tuning, and for guests, which use the host's engines."""
    orchestrator: Manifest

    @property
    def existing(self) -> tuple[Manifest, ...]:
        """Workloads that the run has, in the order of their creation."""
        return tuple(child for child in self if child is not None)


def render_workloads(ctx: RunContext) -> Workloads:
    """Return the workloads of an attempt.

    The pods of the Deployment do not depend on the attempt: an apply for a later attempt keeps them running, unless the specification or
    the operator's rendering has changed.
    """
    return Workloads(
        trainer=_stateful_set(ctx) if ctx.has_trainer else None,
        inference=_render_deployment(ctx) if ctx.has_engines else None,
        orchestrator=_render_orchestrator(ctx),
    )


def _stateful_set(ctx: RunContext) -> Manifest:
    spec: Json = {
        "serviceName": ctx.names.trainer,
        "replicas": ctx.spec.trainer.replicas,
        "podManagementPolicy": "Parallel",  # the pods of a group wait for each other
        "updateStrategy": {"type": "OnDelete"},  # a new template is for the next attempt, which starts without pods
        "revisionHistoryLimit": KEPT_REVISIONS,
        "selector": _pod_selector(ctx, "trainer"),
        "template": pod_template(ctx, "trainer"),
    }
    made = _build_workload(ctx, "StatefulSet", ctx.names.trainer, "trainer", spec)
    made["metadata"]["annotations"][RENDERING_ANNOTATION] = document_mark(_without_affinity(spec["template"]))
    return made


def _render_deployment(ctx: RunContext) -> Manifest:
    ordinary = ctx.engine_total - ctx.spec.inference.on_spot(ctx.engine_total)
    made = _render_engines(
        ctx, ctx.names.inference, ordinary, pod_template(ctx, "inference"), _pod_selector(ctx, "inference")
    )
    made["metadata"]["annotations"][RENDERING_ANNOTATION] = document_mark(made["spec"]["template"])
    return made


def spot_deployment(ctx: RunContext) -> Manifest | None:
    """Return the Deployment of the engines on interruptible nodes, or None if the run has no spot engines.

    Service, network policy and metrics select these pods by the role's label, like other engines. The selector of the other Deployment
    matches them too, which has no effect, because its controller only acts on pods that it owns. It cannot be narrowed, because selectors
    are immutable.
    """
    block = ctx.spec.inference.spot
    if block is None or not ctx.has_engines:
        return None
    selector = _pod_selector(ctx, "inference")
    selector["matchLabels"] = {**selector["matchLabels"], SPOT_LABEL: "true"}
    count = ctx.spec.inference.on_spot(ctx.engine_total)
    made = _render_engines(ctx, ctx.names.spot, count, spot_template(ctx, block), selector)
    made["metadata"]["labels"][SPOT_LABEL] = "true"
    made["metadata"]["annotations"] |= {
        RENDERING_ANNOTATION: document_mark(made["spec"]["template"]),
        SPOT_NODES_ANNOTATION: spot_nodes(block),
    }
    return made


def spot_nodes(block: SpotSpec) -> str:
    """Return the hash of the node fields of `inference.spot`."""
    return document_mark(block.model_dump(mode="json", exclude={"share"}, exclude_defaults=True))


def _render_engines(ctx: RunContext, name: str, count: int, template: Json, selector: Json) -> Manifest:
    spec: Json = {
        "replicas": count,
        # No surge, because a new engine needs the GPUs of an old one. All at once, because another template comes with a new attempt, and
        # its orchestrator must not use engines of two renderings.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
        "revisionHistoryLimit": KEPT_REVISIONS,
        "progressDeadlineSeconds": NO_DEADLINE_SECONDS,
        "selector": selector,
        "template": template,
    }
    return _build_workload(ctx, "Deployment", name, "inference", spec)


def _without_affinity(template: Json) -> Json:
    """Return a template without affinity, which differs between renderings of one attempt because of temporarily excluded nodes."""
    return {**template, "spec": {name: value for name, value in template["spec"].items() if name != "affinity"}}


def _render_orchestrator(ctx: RunContext) -> Manifest:
    template = pod_template(ctx, "orchestrator")
    meta = _workload_metadata(ctx, ctx.names.orchestrator(ctx.attempt), "orchestrator")
    meta["labels"] = template["metadata"]["labels"]
    meta["annotations"] = template["metadata"]["annotations"] | meta["annotations"]
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": meta}
    return head | template | head


def _build_workload(ctx: RunContext, kind: str, name: str, role: Role, spec: dict[str, object]) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": _workload_metadata(ctx, name, role), "spec": spec}


def _workload_metadata(ctx: RunContext, name: str, role: Role) -> Json:
    """Return the metadata of a workload, from which later passes read its attempt and its specification."""
    annotations = {SPEC_HASH_ANNOTATION: ctx.spec_hash}
    if role == "orchestrator" and ctx.spec.network_policy.mode != "None":
        annotations[ACCESS_ANNOTATION] = ctx.settings.network.mark
    if ctx.key_attempt:
        annotations[KEY_ANNOTATION] = str(ctx.key_attempt)
    if ctx.host is not None:
        annotations[HOST_ANNOTATION] = host_mark(ctx.host.uid, ctx.host.attempt)
    return child_metadata(ctx, name, role, ctx.attempt) | {"annotations": annotations}


def _pod_selector(ctx: RunContext, role: Role) -> Json:
    return {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: role}}
