"""Number of engines that a drain leaves. Trainer and orchestrator have no budget: a drain makes them save and restart, uncounted."""

from __future__ import annotations

from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, SPOT_LABEL
from rlrun_operator.render.context import RunContext, child_metadata
from rlrun_operator.state import Json, Manifest


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
