"""Events of an elastic trainer: GPU nodes leave and return."""

from __future__ import annotations

from tests.sim.actions.action import Action
from tests.sim.world import World


def _nodes_go(world: World, a: int, b: int) -> None:
    """Leave nodes for some trainer pods and remove the pods of the others."""
    cluster = world.cluster
    cluster.room = (2, 2, 1, 2, 0, 2)[a % 6]
    for pod in [pod for pod in cluster.pods("trainer") if pod["spec"].get("nodeName")][cluster.room :]:
        cluster.evict(pod, "DeletionByTaintManager")


def _nodes_come(world: World, a: int, b: int) -> None:
    world.cluster.room = None


def _long_calm(world: World, a: int, b: int) -> None:
    """Long enough to wait for nodes, train some steps and grow."""
    for _ in range(4 + a):
        world.calm(3, 1)
        world.pass_time(4.0 + b)


ELASTIC: dict[str, Action] = {
    "nodes go": Action(_nodes_go, 8, always=True),
    "nodes come": Action(_nodes_come, 2, always=True),
    "long calm": Action(_long_calm, 16, always=True),
}
LEFT_OUT = ("wall clock set", "clock far off", "spec edited", "spec mended", "status edited")
"""Events that the rules of sizes exclude, because these rules use a steady clock and one specification."""
