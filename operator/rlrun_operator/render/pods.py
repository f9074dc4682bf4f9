"""Pod templates: the common fields of all pods, placement, and the role's `podTemplate`, which is merged last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.api.kubernetes import KEY_VARIABLE, is_reserved
from rlrun.api.pods import SpotSpec
from rlrun.config.models.file_mark import NOT_READ_BY_ENGINES
from rlrun_operator.names import CONFIG_ANNOTATION, ROLES, RUN_UID_ANNOTATION, SPOT_LABEL, SPOT_SET, Role, child_labels
from rlrun_operator.render import (
    containers,
    demonstrations,
    environments,
    placement,
    security,
    shared_environments,
    volume,
)
from rlrun_operator.render.context import RunContext, config_format, document_mark
from rlrun_operator.render.merge import merge_patch
from rlrun_operator.state import Json

TOKEN_SECONDS = 3600
"""Lifetime of the orchestrator's token; the kubelet renews it in time."""
ENGINE_GRACE_SECONDS = 15
"""Seconds between SIGTERM and SIGKILL of an engine, which has nothing to save."""
MARGIN_SECONDS = 10
"""Seconds that the other roles get in addition to `checkpoint.gracePeriodSeconds`, so that they end by themselves and report the cause."""


def pod_template(ctx: RunContext, role: Role) -> Json:
    """Return metadata (labels, annotations) and spec of a role's pods, with the additions of a queue's admission."""
    made = own_template(ctx, role)
    return placement.with_queue_fields(made, ctx.placed[role]) if role in ctx.placed else made


def spot_template(ctx: RunContext, block: SpotSpec) -> Json:
    """Return metadata and spec of the spot engines' pods: an engine on the nodes of `inference.spot`, which overrides other node fields."""
    made = _on_spot(ctx, block)
    return placement.with_queue_fields(made, ctx.placed[SPOT_SET]) if SPOT_SET in ctx.placed else made


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
        placement.find_contradiction(own_template(ctx, role), ctx.placed[role], role)
        for role in ROLES
        if role in ctx.placed
    ]
    block = ctx.spec.inference.spot
    if block is not None and SPOT_SET in ctx.placed:
        found.append(placement.find_contradiction(_on_spot(ctx, block), ctx.placed[SPOT_SET], "inference.spot"))
    return "; ".join(text for text in found if text)


def own_template(ctx: RunContext, role: Role) -> Json:
    """Metadata (labels, annotations) and spec of a role's pods as the run itself wants them.

    The user's `podTemplate` has the last word on all but what the operator finds and judges pods by: its labels, the restart policy, the
    container called after the role, and the reserved variables, which identify a process. Of its metadata only labels and annotations are
    taken. A key that a PodTemplateSpec does not have is kept, so that the API server's dry-run refuses it by its name.
    """
    patch = placement.role_block(ctx.spec, role).pod_template
    container = containers.role_container(ctx, role)
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
    own = placement.role_block(ctx.spec, role)
    spec: dict[str, object] = {
        "restartPolicy": "Never" if role == "orchestrator" else "Always",
        "terminationGracePeriodSeconds": _grace_seconds(ctx, role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security.pod_context(assigned=ctx.settings.assigned_users),
    }
    if role == "orchestrator":
        spec["serviceAccountName"] = ctx.names.account
    first: list[dict[str, object]] = [containers.folder_container(ctx, role)]
    if role == ctx.model_maker:
        first += containers.demonstrations_container(ctx, role)
        first.append(containers.model_container(ctx, role))
    if role == "orchestrator":
        first += environments.environment_containers(ctx)
        first += containers.environments_container(ctx)
    spec |= {"initContainers": first, "containers": [container], "volumes": _pod_volumes(ctx, role)}
    optional = {
        "nodeSelector": placement.node_selector(ctx.spec, role),
        "tolerations": placement.role_tolerations(ctx.spec, role),
        "affinity": placement.role_affinity(
            ctx.spec, ctx.name, role, beside=_host_affinity(ctx), excluded=() if role == "inference" else ctx.excluded
        ),
        "topologySpreadConstraints": placement.topology_spread(ctx.spec, ctx.name, role),
        "imagePullSecrets": [{"name": secret.name} for secret in own.image_pull_secrets],
        "priorityClassName": own.priority_class_name,
        "runtimeClassName": own.runtime_class_name,
    }
    return spec | {field: value for field, value in optional.items() if value}


def _host_affinity(ctx: RunContext) -> str | None:
    """Return the name of the host if its claim can only be mounted on one node."""
    return ctx.host.name if ctx.host is not None and placement.one_node(ctx.host.spec) else None


def _pod_volumes(ctx: RunContext, role: Role) -> list[Json]:
    memory: Json = {"medium": "Memory"}
    limit = placement.role_block(ctx.spec, role).shared_memory
    if limit is not None:
        memory["sizeLimit"] = limit
    volumes: list[Json] = [
        {"name": volume.DATA, "persistentVolumeClaim": {"claimName": ctx.claim}},
        {"name": containers.CONFIG, "configMap": {"name": ctx.names.account}},
        {"name": containers.SHARED_MEMORY, "emptyDir": memory},
        *({"name": name, "emptyDir": {"sizeLimit": containers.SCRATCH_LIMIT}} for name in containers.SCRATCH),
    ]
    if role == ctx.model_maker:
        volumes += demonstrations.demonstrations_volumes(ctx)
    if role == "orchestrator":
        token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}}
        ca = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
        volumes.append({"name": containers.CREDENTIALS, "projected": {"sources": [token, ca]}})
        volumes += environments.environment_volumes(ctx)
        volumes += shared_environments.shared_volumes(ctx, scratch_limit=containers.SCRATCH_LIMIT)
    return volumes


def _pod_metadata(ctx: RunContext, role: Role, patch: object) -> Json:
    """Merge the user's metadata with ours. Ours win, because the operator finds pods by them; engines have no attempt, as they outlive
    attempts."""
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
