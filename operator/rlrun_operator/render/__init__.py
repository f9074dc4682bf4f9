"""Manifests of a run's children: pure functions of the run, the attempt and the operator's settings.

`render_context` contains the inputs. `run_objects` and `network` render the objects that a run needs once, `workloads` those of each
attempt, from `role_containers`, `environments` and `container_parts`. `strategic_merge` merges `podTemplate`, and `pod_placement` selects
the nodes of pods.
"""

from rlrun_operator.render.network import orchestrator_policy
from rlrun_operator.render.render_context import Host, RunContext, former_spec_hashes, spec_hash
from rlrun_operator.render.run_objects import (
    Prerequisites,
    api_key_secret,
    eviction_budget,
    has_engines_to_keep,
    render_parts,
    render_prerequisites,
)
from rlrun_operator.render.workloads import Workloads, queue_conflicts, render_workloads, spot_deployment, spot_nodes

__all__ = [
    "Host",
    "Prerequisites",
    "RunContext",
    "Workloads",
    "api_key_secret",
    "eviction_budget",
    "former_spec_hashes",
    "has_engines_to_keep",
    "orchestrator_policy",
    "queue_conflicts",
    "render_parts",
    "render_prerequisites",
    "render_workloads",
    "spec_hash",
    "spot_deployment",
    "spot_nodes",
]
