"""Basic events: time, watches, request faults, pods, workloads, nodes and edits of the run."""

from __future__ import annotations

from typing import Any

from rlrun.runtime import exit_codes
from rlrun_operator.names import RESTART_ANNOTATION, ROTATE_ANNOTATION
from rlrun_operator.times import format_rfc3339
from tests.sim.actions.action import Action
from tests.sim.cluster.nodes import NODES
from tests.sim.cluster.pods import end_of, has_started
from tests.sim.operator.process import FAULTS
from tests.sim.world import MAX_STEPS, World

ROLES = ("trainer", "orchestrator", "inference")
CODES = (exit_codes.FAILURE, exit_codes.STORAGE, 137, 143, 255, exit_codes.ATTEMPT_TAKEN, exit_codes.DATA)
WORKLOADS = (("StatefulSet", "run-trainer"), ("Deployment", "run-inference"))
_FAULTS = (*FAULTS, "lost")
EDITS: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"maxSteps": MAX_STEPS + 10},
    {"inference": {"replicas": 2}},
    {"trainer": {"replicas": 0}},
    {"seed": 2},
    {"inference": {"replicas": 1}},
)


def _calm(world: World, a: int, b: int) -> None:
    world.calm(1 + a % 4, b % 3)


def _operate(world: World, a: int, b: int) -> None:
    world.operate(1 + a + b)


def _hear(world: World, a: int, b: int) -> None:
    world.hear(1 + a)


def _controllers(world: World, a: int, b: int) -> None:
    world.cluster.round(stale=a % 2 == 1)


def _time(world: World, a: int, b: int) -> None:
    world.pass_time((0.3, 1, 3, 10, 70, 700)[a % 6])


def _wall(world: World, a: int, b: int) -> None:
    world.clock.set_forward((-3600, -5, 5, 3600)[a % 4])


def _api(world: World, a: int, b: int) -> None:
    world.faults += [_FAULTS[a % len(_FAULTS)]] * (1 + b % 3)


def _api_later(world: World, a: int, b: int) -> None:
    world.faults += ["", ""] * b + [_FAULTS[a % len(_FAULTS)]]


def _unheard(world: World, a: int, b: int) -> None:
    world.deaf = 1 + a % 2


def _dies(world: World, a: int, b: int) -> None:
    world.operate(a + b)
    world.restart_operator()


def _misses(world: World, a: int, b: int) -> None:
    world.miss(1 + a)


def _again(world: World, a: int, b: int) -> None:
    world.hear_again(1 + a % 4)


def _swaps(world: World, a: int, b: int) -> None:
    world.hear_out_of_order()


def _relists(world: World, a: int, b: int) -> None:
    world.relist()


def _exits(world: World, a: int, b: int) -> None:
    role = ROLES[a % 3]
    pod = world.cluster.pod(role, b)
    if pod is not None and has_started(pod) and end_of(pod) is None:
        world.cluster.exit(pod, CODES[b % len(CODES)])


def _pod_goes(world: World, a: int, b: int) -> None:
    pod = world.cluster.pod(ROLES[a % 3], b)
    if pod is None:
        return
    match b % 3:
        case 0:
            world.api.end("Pod", pod["metadata"]["name"])
        case 1:
            world.cluster.evict(pod)
        case _:
            world.api.drop("Pod", pod["metadata"]["name"])


def _pods_forced_away(world: World, a: int, b: int) -> None:
    for role in ROLES[: 2 + a % 2]:
        for pod in world.cluster.pods(role):
            world.api.drop("Pod", pod["metadata"]["name"])


def _lingers(world: World, a: int, b: int) -> None:
    world.cluster.lingering = {role for i, role in enumerate(ROLES) if a >> i & 1}


def _workload_goes(world: World, a: int, b: int) -> None:
    kind, name = WORKLOADS[a % 2]
    if world.own(kind, name) is not None:
        world.api.drop(kind, name)


def _child_goes(world: World, a: int, b: int) -> None:
    if world.own("Lease", "run-progress") is not None:
        world.api.drop("Lease", "run-progress")


def _scaled(world: World, a: int, b: int) -> None:
    kind, name = WORKLOADS[a % 2]
    found = world.own(kind, name)
    if found is not None:
        world.memory.scaled = True
        world.api.put(found, spec=found["spec"] | {"replicas": b % 4})


def _edits(world: World, a: int, b: int) -> None:
    world.edit(**EDITS[a % len(EDITS)])


def _mends(world: World, a: int, b: int) -> None:
    world.edit(trainer={"replicas": 2})


def _annotates(world: World, a: int, b: int) -> None:
    world.annotate(note=f"{a}{b}")


def _suspends(world: World, a: int, b: int) -> None:
    world.edit(suspend=a % 2 == 0)


def _asks_for_a_restart(world: World, a: int, b: int) -> None:
    asks = ROTATE_ANNOTATION if b % 3 == 0 else RESTART_ANNOTATION
    world.memory.restarts_asked += 1
    world.annotate(**{asks: "soon" if a == 0 else format_rfc3339(world.clock.wall())})


def _edits_status(world: World, a: int, b: int) -> None:
    fields = ({"phase": "Complete"}, {"phase": "Nonsense"}, {"observedGeneration": 1}, {"reason": "Edited"})
    world.edit_status(**fields[a % 4], message="edited")


def _node_stops(world: World, a: int, b: int) -> None:
    if len(world.cluster.down) < len(NODES) - 1:
        world.cluster.stop_node(NODES[a % 3])


def _node_tainted(world: World, a: int, b: int) -> None:
    world.cluster.taint()


def _node_starts(world: World, a: int, b: int) -> None:
    for node in sorted(world.cluster.down)[:1]:
        world.cluster.start_node(node)


def _cluster_full(world: World, a: int, b: int) -> None:
    world.cluster.schedules, world.cluster.binds, world.cluster.starts = a % 2 == 0, a % 3 != 0, b % 3 != 0


def _recreated(world: World, a: int, b: int) -> None:
    world.recreate()


BASICS: dict[str, Action] = {
    "calm": Action(_calm, 20, always=True),
    "operate": Action(_operate, 8, always=True),
    "hear": Action(_hear, 5, always=True),
    "controllers": Action(_controllers, 5, always=True),
    "time": Action(_time, 4, always=True),
    "wall clock set": Action(_wall, 1),
    "API fault": Action(_api, 4),
    "API fault later": Action(_api_later, 4),
    "workload made unheard": Action(_unheard, 3),
    "operator dies": Action(_dies, 3),
    "events lost": Action(_misses, 2),
    "events twice": Action(_again, 2),
    "events swapped": Action(_swaps, 2),
    "relist": Action(_relists, 1),
    "process ends": Action(_exits, 5),
    "pod goes": Action(_pod_goes, 4),
    "pods forced away": Action(_pods_forced_away, 2),
    "pods end slowly": Action(_lingers, 2),
    "workload deleted": Action(_workload_goes, 1),
    "lease deleted": Action(_child_goes, 1),
    "workload scaled": Action(_scaled, 2),
    "spec edited": Action(_edits, 2),
    "spec mended": Action(_mends, 1),
    "annotated": Action(_annotates, 1),
    "suspended": Action(_suspends, 2),
    "restart asked": Action(_asks_for_a_restart, 1),
    "status edited": Action(_edits_status, 1),
    "node stops": Action(_node_stops, 1),
    "node tainted": Action(_node_tainted, 1),
    "node starts": Action(_node_starts, 1),
    "cluster full": Action(_cluster_full, 1),
    "run made anew": Action(_recreated, 1),
}
