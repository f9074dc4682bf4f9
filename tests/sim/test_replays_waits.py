"""Regression histories of waits: outdated status messages and expensive passes."""

from __future__ import annotations

from tests.sim.history import replay
from tests.sim.world import World


def _said(world: World, kind: str) -> tuple[str, str]:
    found = next(c for c in world.status["conditions"] if c["type"] == kind)
    return found["reason"], found["message"]


def test_suspended_run_reports_no_earlier_pod_wait() -> None:
    steps = [("volume late", 1, 8), ("calm", 3, 8), ("suspended", 6, 8), ("volume late", 0, 10), ("long wait", 4, 3)]
    world = World(seed=201468)
    world.unbind()
    world.calm(4, 2)
    assert "rule-001" in _said(world, "StorageReady")[1]
    world.edit(suspend=True)
    world.stand()
    assert _said(world, "StorageReady") == ("ClaimWaiting", "claim run-data waits for its volume")
    assert _said(world, "Scheduled")[0] == "Suspended", "it has no pod that could have a node"
    replay(steps, seed=201468)


def test_refused_repair_is_not_reported_after_name_is_taken() -> None:
    steps = [
        ("calm", 0, 2),
        ("name taken", 5, 3),
        ("refused", 11, 5),
        ("calm", 2, 3),
        ("allowed", 11, 9),
        ("long wait", 0, 3),
    ]
    world = replay(steps, seed=203623)
    assert world.status["phase"] == "Running"


def test_refused_claim_is_not_reported_after_name_is_taken() -> None:
    steps = [("refused", 3, 0), ("calm", 0, 6), ("name taken", 10, 10), ("allowed", 5, 2), ("long wait", 5, 11)]
    replay(steps, seed=204189)


def test_taken_name_causes_no_repeated_writes() -> None:
    world = World(seed=1)
    world.calm(9)
    pod = world.cluster.pod("trainer", 0)
    assert pod is not None
    world.make_foreign("Pod", "run-orchestrator-2")
    world.cluster.exit(pod, 1)
    world.stand()
    assert world.reason("Restarting") == "NameTaken"
    before, asked = world.api.writes, world.operator.requests
    world.stand()
    assert world.api.writes == before
    assert 5 <= world.operator.requests - asked <= 30, "it is looked at every ten seconds"
    world.remove_foreign()
    world.calm(20)
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2)


def test_unneeded_taken_name_does_not_delay_the_run() -> None:
    """A cached result about a name belongs to one state of the run."""
    world = World(seed=1)
    world.calm(9)
    pod = world.cluster.pod("trainer", 0)
    assert pod is not None
    world.make_foreign("Pod", "run-orchestrator-2")
    world.cluster.exit(pod, 1)
    world.stand()
    world.remove_foreign()
    world.edit(seed=5)
    world.calm(2)
    assert world.reason("Restarting") != "NameTaken", "an edit is looked at at once"


def test_lifted_engine_refusal_is_not_reported_later() -> None:
    """Its event outlives the refusal, and the engine created since is gone with its creation time."""
    world = replay([("refused", 2, 6), ("calm", 9, 11), ("allowed", 4, 4), ("late warning", 3, 6)], seed=10432)
    assert world.status["phase"] == "Running"


def test_ended_run_does_not_report_earlier_waits() -> None:
    steps = [
        ("calm", 5, 9),
        ("calm", 7, 10),
        ("refused", 6, 0),
        ("calm", 9, 1),
        ("calm", 11, 5),
        ("child deleted", 9, 0),
        ("calm", 3, 8),
        ("long wait", 6, 8),
        ("calm", 7, 7),
    ]
    world = replay(steps, seed=21382)
    assert world.status["phase"] == "Complete"
    assert _said(world, "ChildrenIntact")[0] == "RunOver", "nobody puts the Service right any more"


def test_refused_lease_is_reported_before_the_first_step() -> None:
    """All pods are ready, and only the Lease would report a step."""
    steps = [("calm", 5, 7), ("refused", 4, 4), ("lease deleted", 6, 9), ("long wait", 2, 7)]
    world = replay(steps, seed=610245)
    assert world.status["phase"] == "Running", "it is made again when it may be"
