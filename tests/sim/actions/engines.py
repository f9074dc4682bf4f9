"""Events of autoscaled engines and of engines on interruptible nodes."""

from __future__ import annotations

from rlrun_operator.names import SPOT_LABEL
from tests.sim.actions.action import Action
from tests.sim.world import World


def _spot_nodes_go(world: World, a: int, b: int) -> None:
    """Leave nodes for some spot engines; the others are lost with their engines, with or without an event."""
    cluster = world.cluster
    cluster.spot_room = (0, 1, 0, 2, 0, 1)[a % 6]
    placed = [pod for pod in cluster.pods("inference") if SPOT_LABEL in pod["metadata"]["labels"]]
    for pod in [pod for pod in placed if pod["spec"].get("nodeName")][cluster.spot_room :]:
        if b % 3:
            cluster.evict(pod, "DeletionByTaintManager")
        else:
            world.api.drop("Pod", pod["metadata"]["name"])


def _spot_nodes_come(world: World, a: int, b: int) -> None:
    world.cluster.spot_room = None


def _load(world: World, a: int, b: int) -> None:
    """Make answers longer or shorter."""
    assert world.cluster.fleet is not None
    world.cluster.fleet.demand = 0.4 + a * 0.6


def _share(world: World, a: int, b: int) -> None:
    """Edit the share of spot engines or the bounds."""
    run = world.run
    if run is None:
        return
    engines = run["spec"]["inference"]
    spot = {**world.spec["inference"]["spot"], "share": (0.25, 0.5, 0.75, 1)[a % 4]}
    world.edit(inference={**engines, "spot": spot} if b % 4 else {k: v for k, v in engines.items() if k != "spot"})


def _long_calm(world: World, a: int, b: int) -> None:
    """Long enough to measure a load, drain and start engines. Each part is an event, because quota refusals are
    retried every 10 s.
    """
    world.memory.actions += 1 + a
    for _ in range(2 + a):
        world.calm(3, 1)
        world.pass_time(2.0 + b / 2)


ENGINES: dict[str, Action] = {
    "spot nodes go": Action(_spot_nodes_go, 8, always=True),
    "spot nodes come": Action(_spot_nodes_come, 3, always=True),
    "load": Action(_load, 8, always=True),
    "share edited": Action(_share, 3),
    "long calm with engines": Action(_long_calm, 16, always=True),
}
