"""Rules of the number of engines: by load, by drains, and with changing nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlrun.protocol.messages import lease_annotations as keys
from rlrun_operator.names import SPOT_LABEL, attempt_number
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import raw_conditions
from tests.sim.cluster.api import NAMESPACE
from tests.sim.cluster.fleet import address_of, is_ready
from tests.sim.cluster.pods import owners
from tests.sim.invariants.common import Json

if TYPE_CHECKING:
    from tests.sim.operator.process import Request
    from tests.sim.world import World

SLACK_SECONDS = 2.0
OLD_SECONDS = 900.0
"""Largest delay of a reaction to a report, because a watch may lag and another operator may lead."""
_SPOT_POD = re.compile(r"run-inference-spot-\d+")


def a_lost_spot_engine_never_counts_as_a_failure(world: World, old: Json, new: Json) -> str | None:
    """A lost spot engine neither ends an attempt nor makes a run wait."""
    if new.get("phase") in ("Suspending", "Completing"):
        return None  # all pods end
    failure = new.get("lastFailure") or {}
    # An object that every pod needs was deleted, and only another attempt can create it.
    lacks = failure.get("reason") in (reasons.KEY_LOST, reasons.DRIFTED)
    if _SPOT_POD.match(str(failure.get("podName", ""))) and not lacks:
        return f"lastFailure is {failure.get('podName')}: {failure.get('reason')}"
    for condition in raw_conditions(new):
        told = str(condition.get("message", ""))
        if condition.get("reason") == reasons.PREVIOUS_RUN_ENDING:
            continue  # those belong to a deleted namesake
        if lacks and condition.get("type") == "Restarting":
            continue
        if condition.get("type") in ("Restarting", "Failed", "Scheduled") and _SPOT_POD.search(told):
            return f"{condition.get('type')} says: {told}"
    return None


def the_number_is_within_its_bounds(world: World, old: Json, new: Json) -> str | None:
    block = _autoscale(world)
    desired = (new.get("inference") or {}).get("desired", 0)
    if block is None or not desired:
        return None
    return None if block["min"] <= desired <= block["max"] else f"{desired} engines, from {block}"


def the_number_does_not_swing(world: World, old: Json, new: Json) -> str | None:
    """A change in the other direction follows a period with mostly the present number."""
    block, memory = _autoscale(world), world.memory
    before, now = ((status.get("inference") or {}).get("desired", 0) for status in (old, new))
    if block is None or not before or not now or now == before:
        return None
    at, up = world.clock.steady(), now > before
    last, memory.scaled_at = memory.scaled_at, (at, up)
    if last is None or last[1] == up or at - last[0] >= block["stabilizationSeconds"] / 2 - SLACK_SECONDS:
        return None
    return f"{before} to {now} engines {at - last[0]:.0f} s after a change the other way"


def another_number_rests_on_a_whole_report(world: World, old: Json, new: Json) -> str | None:
    """A complete report is required, so a new leader, a silent run or an old measurement moves no engines."""
    block, fleet = _autoscale(world), world.cluster.fleet
    before, now = ((status.get("inference") or {}).get("desired", 0) for status in (old, new))
    same = old.get("attempt") == new.get("attempt") and old.get("phase") == new.get("phase") == "Running"
    if block is None or fleet is None or not same or now == before:
        return None
    at = world.clock.steady()
    whole = [
        load
        for when, load in fleet.reports
        if at - when <= OLD_SECONDS and load.seconds >= block["stabilizationSeconds"] - SLACK_SECONDS
    ]
    if now < before and not any(load.idle > 0 for load in whole):
        return f"{before} to {now} engines, and none of them idled"
    if now > before and not any(load.waited > 0 and load.engines == before for load in whole):
        return f"{before} to {now} engines, and nobody waited for {before}"
    return None


def no_engine_goes_before_it_is_drained(world: World, asked: Request) -> str | None:
    """Uses the operator's knowledge: ready engines, and engines that their orchestrator has drained."""
    if world.cluster.fleet is None or asked.method != "PATCH" or "/deployments/" not in asked.path:
        return None
    name, number = asked.path.rsplit("/", 1)[1], (asked.body.get("spec") or {}).get("replicas")
    if number is None or _autoscale(world) is None or world.status.get("phase") != "Running":
        return None
    known = world.operator.store.children((NAMESPACE, "run"))
    found = next(
        (child for child in known if child["kind"] == "Deployment" and child["metadata"]["name"] == name), None
    )
    lease = world.operator.store.get("Lease", NAMESPACE, "run-progress")
    if found is None or lease is None or number >= found["spec"]["replicas"]:
        return None
    said = lease["metadata"].get("annotations") or {}
    if keys.ENGINES_DRAINED not in said or attempt_number(said.get(keys.ATTEMPT)) != world.status.get("attempt"):
        return None
    pods = [pod for pod in known if pod["kind"] == "Pod" and found["metadata"]["uid"] in owners(pod) and is_ready(pod)]
    used = [pod for pod in pods if address_of(pod) not in said[keys.ENGINES_DRAINED].split()]
    return f"{number} of {len(pods)} engines stay, and {len(used)} are in use" if number < len(used) else None


def engines_at_rest(world: World) -> str | None:
    """Return the missing engines of a training run in words; nodes for spot engines may be missing."""
    status, run = world.status, world.run
    if world.cluster.fleet is None or run is None:
        return None
    # A further engine finds no node if the claim of the others is deleted.
    placed = all("nodeName" in p["spec"] for p in world.api.all("Pod") if SPOT_LABEL not in p["metadata"]["labels"])
    if placed and status.get("phase") == "Running" and world.reason(reasons.SCHEDULED) != reasons.ALL_SCHEDULED:
        return f"it waits for nodes: {world.reason(reasons.SCHEDULED)}"
    spec, told = run["spec"]["inference"], status.get("inference")
    if told is None:
        return None if status.get("phase") in ("Failed", "Complete") else "nothing is said of engines"
    spot, desired = (told.get("spot") or {}).get("desired", 0), told["desired"]
    if "replicas" in spec and desired != spec["replicas"]:
        return f"{desired} engines are desired, {spec['replicas']} specified"
    made = {child["metadata"]["name"]: child["spec"]["replicas"] for child in world.api.all("Deployment")}
    if ("spot" in spec) != ("run-inference-spot" in made):
        return f"Deployments {sorted(made)} of {spec}"
    extra = made.get("run-inference-spot", 0)
    if extra != spot or made.get("run-inference", 0) < desired - spot:
        return f"Deployments {made}, and {desired} engines are desired, {spot} of them on spot nodes"
    pods = world.cluster.pods("inference")
    counts = [sum((SPOT_LABEL in pod["metadata"]["labels"]) == kind for pod in pods) for kind in (False, True)]
    return None if counts == [made.get("run-inference", 0), extra] else f"engines {counts}, Deployments {made}"


def _autoscale(world: World) -> dict[str, Any] | None:
    run = world.run
    found = (run or {}).get("spec", {}).get("inference", {}).get("autoscale") if world.cluster.fleet else None
    return found if not world.rivals and not world.memory.edited else None


FLEET: tuple[Callable[[World, Json, Json], str | None], ...] = (
    a_lost_spot_engine_never_counts_as_a_failure,
    the_number_is_within_its_bounds,
    the_number_does_not_swing,
    another_number_rests_on_a_whole_report,
)
