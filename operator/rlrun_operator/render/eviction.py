"""Number of engines that a drain leaves. Trainer and orchestrator have no budget: a drain makes them save and restart, uncounted."""

from __future__ import annotations

from rlrun_operator.names import ROLE_LABEL, RUN_LABEL
from rlrun_operator.render.context import RunContext, metadata
from rlrun_operator.state import Manifest


def has_engines_to_keep(ctx: RunContext) -> bool:
    """True if a drain could leave engines of the run: there are several, and some are wanted."""
    return ctx.has_engines and ctx.spec.inference.most > 1 and ctx.spec.inference.min_available > 0


def eviction_budget(ctx: RunContext) -> Manifest:
    """PodDisruptionBudget of the engines: `minAvailable` stay ready, but one may always go, or a node could be drained never.

    Expressed as what may be missing: a budget of before an edit then allows too much for a moment, and never blocks. An engine that is not
    ready serves no request, and may always be evicted. With autoscaling the fewest engines count.
    """
    engines = ctx.spec.inference
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(ctx, ctx.names.inference, "inference"),
        "spec": {
            "maxUnavailable": max(1, engines.least - engines.min_available),
            "selector": {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: "inference"}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
