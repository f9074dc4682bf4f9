"""The three workloads of an attempt: trainer StatefulSet, inference Deployment, orchestrator Pod."""

from __future__ import annotations

from typing import NamedTuple

from rlrun.api.pods import SpotSpec
from rlrun_operator.names import (
    ACCESS_ANNOTATION,
    HOST_ANNOTATION,
    KEY_ANNOTATION,
    RENDERING_ANNOTATION,
    ROLE_LABEL,
    RUN_LABEL,
    SPEC_HASH_ANNOTATION,
    SPOT_LABEL,
    SPOT_NODES_ANNOTATION,
    Role,
    host_mark,
)
from rlrun_operator.render.context import RunContext, child_metadata, document_mark
from rlrun_operator.render.pods import pod_template, spot_template
from rlrun_operator.state import Json, Manifest

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
