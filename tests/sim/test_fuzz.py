"""Part of the operator's fuzzing; `python -m tests.sim --fuzz 10000` runs all of it."""

from __future__ import annotations

from random import Random

import pytest

from tests.sim import fuzz as fuzzing
from tests.sim.fuzz import fuzz
from tests.sim.world import World

BLOCKS, BLOCK = 5, 100
GATE_BLOCKS = 2


@pytest.mark.parametrize(
    "block",
    [*range(GATE_BLOCKS), *(pytest.param(block, marks=pytest.mark.full) for block in range(GATE_BLOCKS, BLOCKS))],
)
def test_operator_explains_any_resource_status_and_children(block: int) -> None:
    problems = [fuzz(seed) for seed in range(block * BLOCK, (block + 1) * BLOCK)]
    assert [problem for problem in problems if problem is not None] == []


@pytest.mark.parametrize(
    "conditions",
    ["none", 7, ["x", 1.5, None], [{"type": "Restarting"}], [{"type": "Failed", "status": []}]],
    ids=str,
)
def test_random_status_values_are_repaired(conditions: object) -> None:
    world = World(document={})
    world.calm(6)
    assert world.run is not None
    world.api.put(
        world.run, status=world.status | {"conditions": conditions, "restarts": "many", "attempt": 1, "inference": True}
    )
    world.calm(3)
    fuzzing._told(world)
    assert world.status["phase"] in ("Starting", "Running")
    assert world.status["restarts"] == 0


@pytest.mark.parametrize("value", ["-1", "9" * 400, "1e999", "NaN", "1e308", ""])
def test_random_lease_values_change_nothing(value: str) -> None:
    world = World(document={})
    world.calm(6)
    lease = world.api.get("Lease", "run-progress")
    assert lease is not None
    before = world.status["progress"]
    said = dict.fromkeys(fuzzing.keys.ALL, value) | {fuzzing.keys.ATTEMPT: "1", fuzzing.keys.STEP: "4"}
    world.api.put(lease, metadata=lease["metadata"] | {"annotations": said})
    world.pass_time(20.0)
    fuzzing._live(world, 3)
    fuzzing._told(world)
    assert world.status["progress"]["totalSteps"] == before["totalSteps"]
    assert "estimatedCompletionTime" not in world.status["progress"]


def test_mutations_change_a_copy_only() -> None:
    tree = {"a": {"b": [1, 2, {"c": 3}]}}
    changed = [fuzzing.mutated(Random(seed), tree, 2) for seed in range(20)]
    assert tree == {"a": {"b": [1, 2, {"c": 3}]}}
    assert sum(other != tree for other in changed) >= 18
