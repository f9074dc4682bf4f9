"""Rules of the size of an elastic trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlrun_operator.names import attempt_of
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import raw_conditions
from tests.sim.cluster.volume import CHECKPOINT_EVERY
from tests.sim.invariants.common import Json, is_of_the_run

if TYPE_CHECKING:
    from tests.sim.world import World


def the_size_is_within_its_bounds(world: World) -> str | None:
    found = _trainer(world)
    if found is None or world.elastic is None:
        return None
    pods, most = found["spec"]["replicas"], world.spec["trainer"]["replicas"]
    made = _ranks(found)
    if not world.elastic["min"] <= made <= most:
        return f"a trainer of {made} pods, which may have {world.elastic['min']} to {most}"
    scaled = world.memory.scaled  # manually, until the operator repairs it
    return None if pods in (0, made) or scaled else f"{pods} pods of a group that waits for {made}"


def the_status_tells_the_size_that_is_there(world: World, old: Json, new: Json) -> str | None:
    found = _trainer(world)
    if found is None or world.elastic is None or new.get("phase") != "Running" or world.rivals:
        return None
    if attempt_of(found["metadata"]) != new.get("attempt"):
        return None
    said = new["trainer"]["desired"]
    return None if said == _ranks(found) else f"status says {said} pods, and {_ranks(found)} were made"


def a_size_does_not_flap(world: World, old: Json, new: Json) -> str | None:
    """A decrease requires the wait for nodes; an increase requires the promised time and a checkpoint."""
    now, before, memory = new.get("trainer") or {}, old.get("trainer") or {}, world.memory
    if world.elastic is None or now.get("changed") == before.get("changed") or not now.get("changed"):
        return None
    at, last = world.clock.steady(), memory.resized_at
    memory.resized_at = at
    if now.get("grownFrom") is None:
        return None
    if last is not None and at - last < world.elastic["growSeconds"] - 2:
        return f"it grows {at - last:.0f} s after the last change; growSeconds is {world.elastic['growSeconds']}"
    volume = world.cluster.volume
    attempt = new["attempt"]
    if volume.step.get(attempt, 0) - volume.complete >= CHECKPOINT_EVERY or volume.complete <= volume.begun_at.get(
        attempt, volume.complete
    ):
        return f"it grows at step {volume.step.get(attempt)} of attempt {attempt}, and the newest checkpoint is of {volume.complete}"
    return None


def fewer_pods_come_after_a_wait(world: World, old: Json, new: Json) -> str | None:
    now, before = new.get("trainer") or {}, old.get("trainer") or {}
    same = now.get("changed") == before.get("changed") or not now.get("changed")  # a suspension resets the size
    if world.elastic is None or same or now.get("grownFrom") is not None:
        return None
    began = world.memory.began_at.get(new.get("attempt", 0))
    waited = world.clock.steady() - began if began is not None else None
    if waited is None or waited >= world.elastic["waitSeconds"] - 2:
        return None
    return (
        f"attempt {new['attempt']} waited for nodes for {waited:.0f} s; waitSeconds is {world.elastic['waitSeconds']}"
    )


def beginnings_are_noted(world: World, old: Json, new: Json) -> str | None:
    """Record the time at which each attempt was recorded; never complains."""
    restarts = any(c.get("type") == reasons.RESTARTING and c.get("status") == "True" for c in raw_conditions(new))
    if not restarts:
        world.memory.began_at.setdefault(new.get("attempt", 0), world.clock.steady())
    return None


def _trainer(world: World) -> Json | None:
    found: Json | None = world.api.get("StatefulSet", "run-trainer")
    return found if found is not None and is_of_the_run(world, found) else None


def _ranks(found: Json) -> int:
    """Return the number of pods that the ranks of a group wait for."""
    env = {one["name"]: one.get("value") for one in found["spec"]["template"]["spec"]["containers"][0]["env"]}
    return int(env["RLRUN_NNODES"])


SIZES: tuple[Callable[[World, Json, Json], str | None], ...] = (
    beginnings_are_noted,
    fewer_pods_come_after_a_wait,
    the_status_tells_the_size_that_is_there,
    a_size_does_not_flap,
)
