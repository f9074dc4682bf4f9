"""Events of a run's children: deleted, edited, blocked by foreign objects, and left over."""

from __future__ import annotations

from rlrun_operator.kube.resources import BY_KIND
from rlrun_operator.names import RUN_LABEL
from tests.sim.actions.action import Action
from tests.sim.cluster.api import Ident, Json
from tests.sim.world import NAME, World

WATCHED_APART = ("RLRun", "Pod", "StatefulSet", "Deployment", "Lease")
"""Kinds with separate events."""
PLACES: tuple[Ident, ...] = (
    ("Service", f"{NAME}-trainer"),
    ("Service", f"{NAME}-inference"),
    ("NetworkPolicy", f"{NAME}-rlrun"),
    ("NetworkPolicy", f"{NAME}-egress"),
    ("ConfigMap", f"{NAME}-rlrun"),
    ("ServiceAccount", f"{NAME}-rlrun"),
    ("Role", f"{NAME}-rlrun"),
    ("RoleBinding", f"{NAME}-rlrun"),
    ("PersistentVolumeClaim", f"{NAME}-data"),
    ("Lease", f"{NAME}-progress"),
    ("StatefulSet", f"{NAME}-trainer"),
    ("Deployment", f"{NAME}-inference"),
    ("Pod", f"{NAME}-trainer-0"),
    ("Pod", f"{NAME}-orchestrator-1"),
    ("Pod", f"{NAME}-orchestrator-2"),
)
"""Names that children have or will have."""


def small_children(world: World) -> list[Json]:
    """Return the run's own objects except workloads, pods and the Lease."""
    kinds = [kind for kind in BY_KIND if kind not in WATCHED_APART]
    found = [child for kind in kinds for child in world.api.all(kind)]
    return [child for child in found if RUN_LABEL in (child["metadata"].get("labels") or ())]


def _deleted(world: World, a: int, b: int) -> None:
    found = [child for child in small_children(world) if child["kind"] != "PersistentVolumeClaim"]
    for child in found[(a * 12 + b) % len(found) :][: 1 + b % 2] if found else ():
        world.damage(child)
        world.api.drop(child["kind"], child["metadata"]["name"])


def _claim_deleted(world: World, a: int, b: int) -> None:
    for claim in world.api.all("PersistentVolumeClaim"):
        if RUN_LABEL in claim["metadata"]["labels"]:
            world.api.end("PersistentVolumeClaim", claim["metadata"]["name"])


def _edited(world: World, a: int, b: int) -> None:
    """Edit fields that the operator has applied."""
    found = [child for child in small_children(world) if child["kind"] not in ("Secret", "PersistentVolumeClaim")]
    if found:
        child = found[(a * 12 + b) % len(found)]
        world.damage(child)
        labels = child["metadata"]["labels"] | {"app.kubernetes.io/managed-by": "somebody"}
        emptied = {part: {} for part in ("spec", "data") if part in child}
        world.api.put(child, metadata=child["metadata"] | {"labels": labels, "managedFields": []}, **emptied)


def _in_the_way(world: World, a: int, b: int) -> None:
    """Create a foreign object with the name of a present or future child; sometimes delete the child first."""
    kind, name = PLACES[(a * 12 + b) % len(PLACES)]
    there = world.api.get(kind, name)
    if there is not None and b % 3 == 0 and RUN_LABEL in (there["metadata"].get("labels") or ()):
        if kind not in WATCHED_APART:
            world.damage(there)
        world.api.drop(kind, name)
        there = None
    if there is None:
        world.make_foreign(kind, name)


def _out_of_the_way(world: World, a: int, b: int) -> None:
    world.remove_foreign()


def _garbage_stays(world: World, a: int, b: int) -> None:
    kinds = ("Lease", "StatefulSet", "Deployment", "Pod", "Secret", "ConfigMap")
    world.cluster.uncollected = {kind for i, kind in enumerate(kinds) if (a * 12 + b) >> i & 1}


def _namesake(world: World, a: int, b: int) -> None:
    """Delete and recreate the run while some children of the previous one still exist."""
    _garbage_stays(world, a, b | 1)
    world.recreate()


def _idle_controller(world: World, a: int, b: int) -> None:
    world.cluster.idle = {kind for i, kind in enumerate(("StatefulSet", "Deployment")) if a >> i & 1}


CHILDREN: dict[str, Action] = {
    "child deleted": Action(_deleted, 3),
    "child edited": Action(_edited, 2),
    "claim deleted": Action(_claim_deleted, 1),
    "name taken": Action(_in_the_way, 3),
    "name free": Action(_out_of_the_way, 2),
    "garbage stays": Action(_garbage_stays, 1),
    "namesake": Action(_namesake, 1),
    "controller idle": Action(_idle_controller, 2),
}
