"""Objects of a run in addition to its pods: volume, configuration, key, progress Lease with its permissions, addresses."""

from __future__ import annotations

from typing import NamedTuple

from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, SPOT_LABEL
from rlrun_operator.render.network import network_policies, render_services
from rlrun_operator.render.render_context import RunContext, child_metadata
from rlrun_operator.state import Json, Manifest

CONFIG_FILE = "run.json"
"""Key in the ConfigMap, and name of the file in the pods."""
API_KEY = "api-key"
"""Key in the Secret."""
LEASE_SECONDS = 15
"""The orchestrator renews its Lease at least this often."""


class Prerequisites(NamedTuple):
    """Objects that must exist before an attempt's workloads."""

    create: tuple[Manifest, ...]
    """Objects to create; existing ones are not changed: the Lease contains progress, and the claim is only enlarged (`growth`)."""
    apply: tuple[Manifest, ...]
    """Objects for server-side apply."""


def render_prerequisites(ctx: RunContext) -> Prerequisites:
    """Return all objects except the Secret and the workloads, in the order of their creation."""
    return Prerequisites(create=(*_render_claim(ctx), _render_lease(ctx)), apply=_build_parts(ctx, ctx.config_text))


def render_parts(ctx: RunContext) -> tuple[Manifest, ...]:
    """Return the applied objects without the text of the configuration, whose rendering takes most of the time: for comparisons of
    fields."""
    return _build_parts(ctx, "")


def _build_parts(ctx: RunContext, text: str) -> tuple[Manifest, ...]:
    return (
        *_render_account(ctx),
        _config_map(ctx, text),
        *render_services(ctx),
        *network_policies(ctx),
        *_render_budget(ctx),
    )


def api_key_secret(ctx: RunContext, key: str) -> Manifest:
    """The Secret with the key that all roles of the run share. Created once; the operator has no right to read it back.

    Args:
        ctx: the run.
        key: the key, at least 8 characters.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(ctx, ctx.key_secret),
        "type": "Opaque",
        "immutable": True,
        "stringData": {API_KEY: key},
    }


def _render_budget(ctx: RunContext) -> list[Manifest]:
    """Return the eviction budget of the engines. Trainer and orchestrator have none: a drain makes them save and restart, which is not
    counted."""
    return [eviction_budget(ctx)] if has_engines_to_keep(ctx) else []


def _render_claim(ctx: RunContext) -> list[Manifest]:
    template = ctx.spec.storage.template
    if template is None or ctx.host is not None:
        return []
    spec: dict[str, object] = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": template.size}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    # Until it is bound, the run owns the claim (`decide.claims`). Its labels are already those of a claim that stays.
    meta = child_metadata(ctx, ctx.names.claim)
    if ctx.spec.storage.when_deleted == "Retain":
        meta["labels"] = child_metadata(ctx, ctx.names.claim, owned=False)["labels"]
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}]


def _render_lease(ctx: RunContext) -> Manifest:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": child_metadata(ctx, ctx.names.progress),
        "spec": {"leaseDurationSeconds": LEASE_SECONDS},
    }


def _render_account(ctx: RunContext) -> list[Manifest]:
    """Return the orchestrator's account; its only permission is to renew the run's Lease."""
    name, group = ctx.names.account, "rbac.authorization.k8s.io"

    def meta() -> Json:
        return child_metadata(ctx, name, "orchestrator")

    rule = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [ctx.names.progress],
        "verbs": ["get", "patch"],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(), "automountServiceAccountToken": False},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta(), "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta(),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": ctx.namespace}],
        },
    ]


def _config_map(ctx: RunContext, text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(ctx, ctx.names.account),
        "data": {CONFIG_FILE: text},
    }


def has_engines_to_keep(ctx: RunContext) -> bool:
    """Return whether an eviction budget makes sense: the run has several engines, and `minAvailable` is above 0."""
    engines = ctx.spec.inference
    return (
        ctx.has_engines
        and engines.max_replicas - engines.on_spot(engines.max_replicas) > 1
        and engines.min_available > 0
    )


def eviction_budget(ctx: RunContext) -> Manifest:
    """Return the PodDisruptionBudget of the engines: `minAvailable` stay ready, but one may always be evicted, so that nodes can be
    drained.

    It limits the unavailable engines: after an edit, an old budget then allows too many evictions for a moment, but never blocks them. An
    engine that is not ready serves no request, and may always be evicted. With autoscaling the minimum number of engines counts. Spot
    engines are not part of it, because their loss would block the drain of other engines' nodes.
    """
    engines = ctx.spec.inference
    selector: Json = {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: "inference"}}
    if engines.spot is not None:
        selector["matchExpressions"] = [{"key": SPOT_LABEL, "operator": "DoesNotExist"}]
    least = engines.min_replicas - engines.on_spot(engines.min_replicas)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(ctx, ctx.names.inference, "inference"),
        "spec": {
            "maxUnavailable": max(1, least - engines.min_available),
            "selector": selector,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
