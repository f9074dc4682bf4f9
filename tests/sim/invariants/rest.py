"""Rules of the state of rest after the last fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlrun_operator.names import MANAGER, attempt_of
from rlrun_operator.status import reasons
from tests.sim.invariants.common import TERMINAL, derived, is_group, may_go_on
from tests.sim.invariants.fleet import engines_at_rest
from tests.sim.invariants.truth import over

if TYPE_CHECKING:
    from tests.sim.world import World

NEVER_AGAIN = ("Secret",)
"""Kinds that are never recreated: a new key has a new name, and a single engine has no budget."""
WRITES_AT_MOST = 60
"""Write requests that every run may cost ..."""
WRITES_OF_AN_ATTEMPT = 40
"""... each of its attempts ..."""
WRITES_OF_AN_ACTION = 12
"""... and each event."""


def at_rest(world: World) -> str | None:
    """Return the difference from a healthy or final state."""
    run, status, cluster = world.run, world.status, world.cluster
    if run is None:
        return None
    if status.get("phase") not in ("Running", "Suspended", *TERMINAL):
        return f"no rest: phase {status.get('phase')}: {status.get('reason')}: {status.get('message')}"
    if status.get("observedGeneration") != run["metadata"]["generation"]:
        return f"observedGeneration {status.get('observedGeneration')}, generation {run['metadata']['generation']}"
    if status["phase"] != derived(status):
        return f"phase {status['phase']}, conditions say {derived(status)}"
    counts = {role: len(cluster.pods(role)) for role in ("trainer", "orchestrator", "inference")}
    if status["phase"] == "Suspended":
        if not run["spec"].get("suspend"):
            return f"no rest: Suspended, and spec.suspend is not true: {status.get('message')}"
        return f"no rest: {counts} in phase Suspended" if any(counts.values()) else None
    if (message := over(world)) is not None:
        return f"no rest: {message}"
    if status["phase"] == "Failed" and may_go_on(status):
        return f"no rest: the specification is mended, and the run is Failed: {status.get('message')}"
    if status["phase"] in TERMINAL:
        return f"no rest: {counts} in phase {status['phase']}" if counts["trainer"] or counts["inference"] else None
    wanted = {"trainer": world.trainers, "orchestrator": 1, "inference": counts["inference"]}
    if cluster.fleet is None:
        wanted["inference"] = run["spec"]["inference"]["replicas"]
    elif (lacks := engines_at_rest(world)) is not None:
        return f"no rest: {lacks}"
    if counts != wanted:
        return f"no rest: {counts} pods, wanted {wanted}"
    if (lacks := lacking(world)) is not None:
        return f"no rest: {lacks}"
    # A further engine without a node, because the claim of the others is deleted, has not read a key yet.
    held = {cluster.keys.get(pod["metadata"]["uid"]) for pod in world.api.all("Pod") if pod["spec"].get("nodeName")}
    if len(held) > 1 or None in held:
        return f"no rest: {len(held)} API keys in the run's pods"
    attempts = {attempt_of(pod["metadata"]) for pod in world.api.all("Pod") if is_group(pod)}
    return None if attempts == {status["attempt"]} else f"no rest: attempts {attempts}, status {status['attempt']}"


def lacking(world: World) -> str | None:
    """Return a deleted or edited child that neither a repair nor a new attempt has restored."""
    if world.api.get("Lease", "run-progress") is None:
        return "nothing is heard of a run without its Lease"
    for (kind, name), (_, then) in world.memory.damaged.items():
        if kind in NEVER_AGAIN or (kind == "PodDisruptionBudget" and _kept(world) < 2):
            continue
        if world.status["attempt"] <= then and _waits(world, kind):
            continue
        found = world.api.get(kind, name)
        if found is None or found["metadata"]["labels"].get("app.kubernetes.io/managed-by") != MANAGER:
            return f"{kind} {name} was damaged in attempt {then} and is in attempt {world.status['attempt']}"
    return None


def _kept(world: World) -> int:
    """Return the largest number of engines that a drain should spare; those on interruptible nodes have no budget."""
    block = (world.run or {})["spec"]["inference"]
    most = (block.get("autoscale") or {}).get("max", block.get("replicas", 1))
    share = (block.get("spot") or {}).get("share", 0.0)
    return int(most - min(int(share * most + 1e-9), most - block.get("minAvailable", 1)))


def _waits(world: World, kind: str) -> bool:
    """Whether a damaged child waits for the next attempt, because the specification has changed since the present one."""
    valid = next((c for c in world.status["conditions"] if c["type"] == reasons.CONFIGURATION_VALID), {})
    pending = valid.get("reason") in (reasons.CHANGE_PENDING, reasons.FORBIDDEN)
    independent = kind in ("Service", "ServiceAccount", "Role", "RoleBinding")
    return valid.get("reason") == reasons.INVALID_CONFIGURATION or (pending and not independent)


def of_writes(world: World) -> str | None:
    """Return a complaint if the run has cost more requests than its history explains."""
    attempts = world.status.get("attempt", 0)
    most = WRITES_AT_MOST + WRITES_OF_AN_ATTEMPT * (attempts + world.lives) + WRITES_OF_AN_ACTION * world.memory.actions
    return f"{world.api.writes} writes for {attempts} attempts" if world.api.writes > most else None
