"""Objects of a run beside its pods: volume, configuration, key, progress Lease and the right to renew it, addresses."""

from __future__ import annotations

from typing import NamedTuple

from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, SPOT_LABEL
from rlrun_operator.render.context import RunContext, child_metadata
from rlrun_operator.render.network import network_policies, render_services
from rlrun_operator.state import Json, Manifest

CONFIG_FILE = "run.json"
"""Key of the ConfigMap, and the file's name in the pods."""
API_KEY = "api-key"
"""Key of the Secret."""
LEASE_SECONDS = 15
"""The orchestrator renews its Lease at least this often."""


class Prerequisites(NamedTuple):
    """Objects that must exist before an attempt's workloads."""

    create: tuple[Manifest, ...]
    """POST; what exists is left as it is: the Lease's progress is not ours to reset, and the claim is enlarged alone (`growth`)."""
    apply: tuple[Manifest, ...]
    """Server-side apply."""


def render_prerequisites(ctx: RunContext) -> Prerequisites:
    """Everything but the Secret and the workloads, in the order in which it should appear."""
    return Prerequisites(create=(*_render_claim(ctx), _render_lease(ctx)), apply=_build_parts(ctx, ctx.config_text))


def render_parts(ctx: RunContext) -> tuple[Manifest, ...]:
    """Objects that are applied, without the text of the configuration, which takes most of the time to make: for their names and fields."""
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
    """Number of engines that a drain leaves. Trainer and orchestrator have no budget: a drain makes them save and restart, uncounted."""
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
    # Until it has a volume it goes with the run (`decide.objects.claims`); its labels are those of one that stays.
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
    """The orchestrator's identity; its only right is to renew the run's Lease."""
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
    """True if a drain could leave engines of the run: there are several, and some are wanted."""
    engines = ctx.spec.inference
    return ctx.has_engines and engines.most - engines.on_spot(engines.most) > 1 and engines.min_available > 0


def eviction_budget(ctx: RunContext) -> Manifest:
    """PodDisruptionBudget of the engines: `minAvailable` stay ready, but one may always go, or a node could be drained never.

    Expressed as what may be missing: a budget of before an edit then allows too much for a moment, and never blocks. An engine that is not
    ready serves no request, and may always be evicted. With autoscaling the fewest engines count. Spot engines are no part of it: were they
    counted, their loss would keep the nodes of the others from being drained.
    """
    engines = ctx.spec.inference
    selector: Json = {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: "inference"}}
    if engines.spot is not None:
        selector["matchExpressions"] = [{"key": SPOT_LABEL, "operator": "DoesNotExist"}]
    least = engines.least - engines.on_spot(engines.least)
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
