"""GPU time and budget in the simulation, compared with the cluster's own count."""

from __future__ import annotations

from rlrun_operator.times import seconds_of
from tests.sim.world import WITH_GPUS, World

GPUS = 2 * 2 + 1


def counted_seconds(world: World) -> int:
    return sum(world.status["cost"]["gpuSeconds"].values())


def held_seconds(world: World) -> float:
    until = seconds_of(world.status["cost"]["countedTo"])
    assert until is not None
    return sum(pod.held(until) for pod in world.api.gpu_time.pods.values())


def test_hour_without_operator_is_counted_once() -> None:
    world = World(WITH_GPUS)
    world.calm(20)
    before = counted_seconds(world)
    world.operator.die()
    world.clock.pass_(3600)
    world.restart_operator()
    world.calm(3, steps=0)
    assert counted_seconds(world) - before >= 3600 * GPUS
    assert abs(counted_seconds(world) - held_seconds(world)) <= 3 * 2


def test_spent_budget_suspends_and_larger_budget_resumes() -> None:
    world = World(WITH_GPUS | {"budget": {"gpuHours": 300 * GPUS / 3600}, "maxSteps": 10_000})
    world.calm(20)
    for _ in range(30):
        world.pass_time(10)
        world.calm(1, steps=0)
    world.calm(20, steps=0)
    assert (world.status["phase"], world.status["reason"]) == ("Suspended", "BudgetSpent")
    assert not [pod for pod in world.api.all("Pod") if "nodeName" in pod["spec"]]
    assert counted_seconds(world) <= (300 + 40) * GPUS
    done = world.status["progress"]["step"]
    assert world.cluster.volume.complete <= done
    world.edit(budget={"gpuHours": 100})
    world.calm(30)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 0)
    world.rest()
