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
"""A Deployment's own deadline would only add writes: how long a start may take is judged elsewhere."""
KEPT_REVISIONS = 1
"""A rendering is never rolled back."""


class Workloads(NamedTuple):
    """Workloads of an attempt."""

    trainer: Manifest | None
    """None: a guest is trained by its host's, an evaluation trains nothing."""
    inference: Manifest | None
    """None: supervised fine-tuning runs no engines, a guest uses its host's."""
    orchestrator: Manifest

    @property
    def existing(self) -> tuple[Manifest, ...]:
        """Existing workloads, in the order of their making."""
        return tuple(child for child in self if child is not None)


def render_workloads(ctx: RunContext) -> Workloads:
    """The attempt's workloads.

    The Deployment's pods do not depend on the attempt: applied again for a later one it leaves them running, unless the specification
    or the operator's rendering has changed.
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
        "updateStrategy": {"type": "OnDelete"},  # a new template is for the next attempt, which starts from no pods
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
    """The Deployment of the engines on interruptible nodes; None: the run has none.

    Its pods are engines as the others: the same Service, network policy and metrics find them by the role's label. The selector of the
    other Deployment takes them in as well, which changes nothing: its controller acts on what it owns. That one cannot be narrowed, as
    selectors are immutable.
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
    """Mark of the nodes that `inference.spot` names."""
    return document_mark(block.model_dump(mode="json", exclude={"share"}, exclude_defaults=True))


def _render_engines(ctx: RunContext, name: str, count: int, template: Json, selector: Json) -> Manifest:
    spec: Json = {
        "replicas": count,
        # No surge: the GPUs of a new engine are those of an old one. All at once: another template comes with a new attempt, whose
        # orchestrator is not to meet engines of two renderings.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
        "revisionHistoryLimit": KEPT_REVISIONS,
        "progressDeadlineSeconds": NO_DEADLINE_SECONDS,
        "selector": selector,
        "template": template,
    }
    return _build_workload(ctx, "Deployment", name, "inference", spec)


def _without_affinity(template: Json) -> Json:
    """Common part of two renderings within one attempt: nodes are excluded for a time."""
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
    """Metadata that show a later look whether the object is of this attempt and this specification."""
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
