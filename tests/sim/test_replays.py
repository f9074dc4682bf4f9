"""Regression histories, minimized."""

from __future__ import annotations

import pytest

from rlrun_operator.names import ROLE_LABEL
from tests.sim.cluster.admission import Refusal
from tests.sim.history import replay
from tests.sim.world import World


def test_lost_lease_is_recreated() -> None:
    """The orchestrator may only renew the Lease, so without it no further progress would be reported."""
    world = replay([("operate", 3, 11), ("lease deleted", 0, 7)], seed=11)
    assert world.api.get("Lease", "run-progress") is not None


def test_quota_refusal_ends_the_previous_attempt_once() -> None:
    world = replay([("calm", 9, 9), ("pod goes", 1, 7), ("calm", 9, 5), ("API fault", 10, 4), ("calm", 5, 5)], seed=240)
    assert (world.status["restarts"], world.status["attempt"]) == (1, 2)
    assert {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.api.all("Pod")} == {
        "trainer",
        "orchestrator",
        "inference",
    }


@pytest.mark.parametrize("clock", range(4))
def test_wrong_clock_does_not_replace_pods(clock: int) -> None:
    world = replay([("wall clock set", clock, 0), *[("calm", 3, 1)] * 3], seed=1)
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 0)


def test_backoff_ends_although_clock_is_set_back() -> None:
    world = World(seed=1)
    world.calm(8)
    for rounds in (10, 2):
        pod = world.cluster.pod("trainer", 0)
        assert pod is not None
        world.cluster.exit(pod, 1)
        world.calm(rounds)
    assert world.status["nextRetryTime"]
    world.clock.set_forward(-3600)
    world.calm(30)
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 3)


def test_events_before_the_recorded_attempt_are_handled() -> None:
    """The first pass created the children, and the second one recorded them without a check of their state."""
    steps = [
        ("calm", 9, 9),
        ("API fault later", 2, 5),
        ("pods forced away", 1, 7),
        ("time", 8, 5),
        ("calm", 6, 9),
        ("controllers", 4, 10),
        ("pods forced away", 7, 11),
        ("API fault later", 10, 1),
        ("calm", 6, 2),
    ]
    world = replay(steps, seed=14554)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 3, 2)


def test_clock_set_back_does_not_delay_suspension() -> None:
    steps = [
        ("calm", 10, 1),
        ("suspended", 10, 6),
        ("operate", 9, 7),
        ("wall clock set", 4, 8),
        ("workload deleted", 2, 2),
    ]
    world = replay(steps, seed=12250)
    assert (world.status["phase"], world.status["attempt"]) == ("Suspended", 1)


def test_unanswered_creation_is_not_repeated_with_stale_cache() -> None:
    steps = [
        ("calm", 11, 5),
        ("process ends", 6, 0),
        ("calm", 0, 7),
        ("API fault later", 5, 6),
        ("calm", 10, 6),
        ("events lost", 11, 5),
    ]
    world = replay(steps, seed=10117)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 1)


def test_young_pod_of_deleted_run_is_not_adopted() -> None:
    """The pod was created in the same second as the next run, so its time fits both runs."""
    world = World(seed=1)
    world.calm(8)
    for role in ("trainer", "orchestrator"):
        for pod in world.cluster.pods(role):
            world.api.drop("Pod", pod["metadata"]["name"])
    world.cluster.round()
    world.cluster.round()
    world.hear()
    world.recreate()
    world.cluster.lingering.add("trainer")
    world.calm(3)
    assert world.reason("Scheduled") == "PreviousRunEnding"
    world.rest()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2), "the volume knows attempt 1"
    assert world.status["restartsCountedTowardsMax"] == 0


def test_deleted_statefulset_is_not_recreated_next_to_its_pods() -> None:
    """Its earlier pods survive on silent nodes, so that new pods of the same attempt would run together with them."""
    steps = [
        ("node stops", 0, 9),
        ("API fault later", 9, 7),
        ("API fault", 10, 5),
        ("calm", 7, 1),
        ("node stops", 10, 3),
        ("calm", 7, 9),
        ("calm", 2, 7),
        ("workload deleted", 2, 6),
        ("time", 9, 8),
        ("controllers", 8, 11),
        ("calm", 8, 11),
    ]
    world = replay(steps, seed=18294)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 0)


def test_attempt_waits_for_unseen_pods_of_deleted_statefulset() -> None:
    """The StatefulSet recreated the pods and was then deleted: the operator received its deletion before the pods."""
    steps = [
        ("calm", 9, 8),
        ("pods forced away", 10, 4),
        ("calm", 8, 11),
        ("workload deleted", 4, 2),
        ("operate", 4, 9),
    ]
    world = replay(steps, seed=26342)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 1)


def test_unrecorded_attempt_that_completes_reports_its_base() -> None:
    steps = [
        ("calm", 0, 9),
        ("operate", 1, 5),
        *[("calm", a, b) for a, b in ((3, 5), (7, 8), (5, 5), (2, 3), (0, 1), (1, 11), (10, 4))],
        ("API fault later", 2, 10),
        *[("calm", a, b) for a, b in ((8, 7), (3, 9), (1, 5))],
        ("API fault", 1, 2),
        ("process ends", 3, 2),
        *[("calm", a, b) for a, b in ((5, 6), (8, 6), (5, 1), (10, 2), (1, 10), (10, 0), (11, 5))],
    ]
    world = replay(steps, seed=37697)
    assert (world.status["phase"], world.status["attempt"], world.status["checkpoint"]["resumedFromStep"]) == (
        "Complete",
        2,
        30,
    )


def test_abandoned_attempt_deletes_its_unseen_orchestrator() -> None:
    """The response of its creation and its event were lost, and then the StatefulSet was deleted."""
    steps = [
        ("cluster full", 3, 4),
        ("calm", 10, 10),
        ("API fault later", 5, 7),
        ("workload deleted", 6, 7),
        ("pods forced away", 0, 11),
        ("calm", 11, 5),
        ("events lost", 6, 2),
        ("workload deleted", 10, 0),
        ("calm", 3, 10),
    ]
    world = replay(steps, seed=23724)
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 3)


# ---- wider simulation


def test_corrected_run_waiting_for_namesake_recovers() -> None:
    world = replay([("calm", 7, 1), ("run made anew", 1, 3), ("spec edited", 3, 5), ("calm", 8, 6)], seed=8)
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize("before", [("calm", 7, 5), ("operate", 6, 10)], ids=str)
def test_run_with_deleted_claim_restarts_on_a_new_one(before: tuple[str, int, int]) -> None:
    world = replay([before, ("pod goes", 0, 10), ("claim deleted", 2, 2)], seed=25)
    claim = world.api.get("PersistentVolumeClaim", "run-data")
    assert claim is not None
    assert "deletionTimestamp" not in claim["metadata"]
    assert world.status["phase"] == "Running"


def test_claim_deleted_before_record_is_not_waited_for() -> None:
    steps = [("workload made unheard", 9, 0), ("API fault later", 0, 11), ("calm", 10, 2), ("claim deleted", 6, 2)]
    assert replay(steps, seed=569).status["phase"] == "Running"


def test_unavailable_webhook_is_reported_at_every_attempt() -> None:
    replay([("refused", 6, 5), ("long wait", 9, 4)], seed=219)
    replay([("calm", 9, 8), ("refused", 6, 5), ("process ends", 3, 7), ("long wait", 9, 4)], seed=219)


def test_current_refusal_is_reported() -> None:
    steps = [("refused", 3, 7), ("calm", 3, 7), ("allowed", 0, 1), ("refused", 9, 10), ("long wait", 5, 10)]
    replay(steps, seed=605)


def test_refusal_before_the_attempt_is_not_reported() -> None:
    replay([("late warning", 1, 3), ("refused", 5, 2), ("long wait", 9, 1)], seed=434)


def test_run_with_foreign_lease_name_continues() -> None:
    replay([("calm", 8, 3), ("name taken", 4, 6), ("long wait", 6, 10)], seed=1222)


def test_run_with_refused_first_attempt_has_not_started() -> None:
    world = World(seed=956)
    world.api.refusals.append(Refusal(world.mark(), "webhook", "ConfigMap"))
    world.calm(3)
    assert (world.status["phase"], world.status.get("attempt", 0)) == ("Pending", 0)
    replay([("refused", 6, 3), ("calm", 10, 4)], seed=956)


def test_unseen_attempt_is_recorded_despite_refused_service() -> None:
    steps = [
        ("workload made unheard", 11, 10),
        ("calm", 0, 1),
        ("controllers", 5, 8),
        ("events lost", 9, 11),
        ("calm", 4, 1),
        ("refused", 1, 5),
        ("calm", 9, 4),
    ]
    world = replay(steps, seed=18)
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 1)


@pytest.mark.parametrize("restarted", [False, True])
def test_unrecorded_attempt_is_recorded_despite_refusals(restarted: bool) -> None:
    """Otherwise no pass would see its failures."""
    world = World(seed=1)
    attempt = 1 + restarted
    if restarted:
        world.calm(9)
        pod = world.cluster.pod("trainer", 0)
        assert pod is not None
        world.cluster.exit(pod, 1)
        world.calm(1)
    while world.api.get("Pod", f"run-orchestrator-{attempt}") is None:
        world.hear()
        world.operate(1)
        world.cluster.round()
        world.pass_time(0.5)
        assert world.operator.requests < 1000
    world.restart_operator()
    world.api.refusals.append(Refusal(world.mark(), "webhook", "Service"))
    world.stand()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", attempt)


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment", "Service"])
def test_run_with_refused_resumption_stays_suspended(kind: str) -> None:
    world = World(seed=1)
    world.calm(12)
    world.edit(suspend=True)
    world.calm(12)
    refusal = Refusal(world.mark(), "webhook", kind)
    world.api.refusals.append(refusal)
    world.edit(suspend=False)
    world.stand()
    assert (world.status["phase"], world.status["attempt"]) == ("Suspended", 1)
    assert refusal.mark in world.status["message"]
    world.rest()
    assert (world.status["phase"], world.status["attempt"], world.status.get("restarts", 0)) == ("Running", 2, 0)


def test_repaired_child_with_lost_event_is_not_reapplied() -> None:
    """The cache lacks the child, but the API server has it, perhaps as another release created it."""
    steps = [
        ("calm", 5, 3),
        ("API fault", 5, 7),
        ("child deleted", 4, 1),
        ("calm", 0, 11),
        ("operate", 11, 3),
        ("events lost", 2, 4),
    ]
    world = replay(steps, seed=31095)
    assert (world.status["phase"], world.reason("ChildrenIntact")) == ("Running", "Repaired")
