"""Histories that went wrong once, cut down to what they need."""

from __future__ import annotations

import pytest

from rlrun_operator.names import ROLE_LABEL
from tests.sim.cluster.admission import Refusal
from tests.sim.history import replay
from tests.sim.world import World


def test_a_lost_lease_is_made_again() -> None:
    """The orchestrator may only renew it: nothing would ever be heard of the run again."""
    world = replay([("operate", 3, 11), ("lease deleted", 0, 7)], seed=11)
    assert world.api.get("Lease", "run-progress") is not None


def test_a_quota_that_keeps_an_attempt_out_does_not_end_the_one_before_twice() -> None:
    world = replay([("calm", 9, 9), ("pod goes", 1, 7), ("calm", 9, 5), ("API fault", 10, 4), ("calm", 5, 5)], seed=240)
    assert (world.status["restarts"], world.status["attempt"]) == (1, 2)
    assert {pod["metadata"]["labels"][ROLE_LABEL] for pod in world.api.all("Pod")} == {
        "trainer",
        "orchestrator",
        "inference",
    }


@pytest.mark.parametrize("clock", range(4))
def test_an_operator_whose_clock_is_wrong_takes_no_pod_for_a_replaced_one(clock: int) -> None:
    world = replay([("wall clock set", clock, 0), *[("calm", 3, 1)] * 3], seed=1)
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 0)


def test_a_backoff_ends_although_the_clock_is_set_back() -> None:
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


def test_what_had_happened_before_an_attempt_was_whole_on_record_is_acted_on() -> None:
    """The first pass made the children, the second put them on record: nobody had asked yet what had become of them."""
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


def test_a_clock_that_was_set_back_does_not_lengthen_a_suspension() -> None:
    steps = [
        ("calm", 10, 1),
        ("suspended", 10, 6),
        ("operate", 9, 7),
        ("wall clock set", 4, 8),
        ("workload deleted", 2, 2),
    ]
    world = replay(steps, seed=12250)
    assert (world.status["phase"], world.status["attempt"]) == ("Suspended", 1)


def test_a_workload_whose_making_was_not_answered_is_not_rendered_again_over_an_old_view() -> None:
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


def test_a_pod_of_a_deleted_run_is_not_taken_over_however_young_it_is() -> None:
    """It was made in the second in which the next run was: by its time it could be of either."""
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


def test_a_statefulset_that_goes_before_its_attempt_is_whole_on_record_is_not_made_again_beside_its_pods() -> None:
    """Pods of the one before live on, on nodes that answer no more: those of another one of the same attempt would work beside them."""
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


def test_an_attempt_does_not_begin_beside_pods_that_a_deleted_statefulset_had_made_unseen() -> None:
    """The StatefulSet made them anew, then somebody deleted it: the operator heard that it was gone before it heard of the pods."""
    steps = [
        ("calm", 9, 8),
        ("pods forced away", 10, 4),
        ("calm", 8, 11),
        ("workload deleted", 4, 2),
        ("operate", 4, 9),
    ]
    world = replay(steps, seed=26342)
    assert (world.status["phase"], world.status["attempt"], world.status["restarts"]) == ("Running", 2, 1)


def test_an_attempt_that_was_never_put_on_record_and_completes_tells_where_it_began() -> None:
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


def test_an_attempt_that_is_given_up_is_asked_for_the_orchestrator_that_nobody_has_seen() -> None:
    """Its making was not answered, its event was lost, and then somebody deleted the StatefulSet."""
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


# ---- of the wider simulation


def test_a_mended_run_that_waits_for_its_namesake_is_not_failed_for_ever() -> None:
    world = replay([("calm", 7, 1), ("run made anew", 1, 3), ("spec edited", 3, 5), ("calm", 8, 6)], seed=8)
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize("before", [("calm", 7, 5), ("operate", 6, 10)], ids=str)
def test_a_run_whose_claim_somebody_deletes_begins_anew_on_another_one(before: tuple[str, int, int]) -> None:
    world = replay([before, ("pod goes", 0, 10), ("claim deleted", 2, 2)], seed=25)
    claim = world.api.get("PersistentVolumeClaim", "run-data")
    assert claim is not None
    assert "deletionTimestamp" not in claim["metadata"]
    assert world.status["phase"] == "Running"


def test_a_claim_that_goes_before_the_attempt_is_on_record_is_not_waited_for() -> None:
    steps = [("workload made unheard", 9, 0), ("API fault later", 0, 11), ("calm", 10, 2), ("claim deleted", 6, 2)]
    assert replay(steps, seed=569).status["phase"] == "Running"


def test_a_webhook_that_is_away_is_told_at_the_first_attempt_and_at_a_later_one() -> None:
    replay([("refused", 6, 5), ("long wait", 9, 4)], seed=219)
    replay([("calm", 9, 8), ("refused", 6, 5), ("process ends", 3, 7), ("long wait", 9, 4)], seed=219)


def test_the_present_refusal_is_told() -> None:
    steps = [("refused", 3, 7), ("calm", 3, 7), ("allowed", 0, 1), ("refused", 9, 10), ("long wait", 5, 10)]
    replay(steps, seed=605)


def test_a_refusal_of_before_the_attempt_is_not_told() -> None:
    replay([("late warning", 1, 3), ("refused", 5, 2), ("long wait", 9, 1)], seed=434)


def test_a_run_whose_lease_has_the_name_of_somebody_elses_goes_on() -> None:
    replay([("calm", 8, 3), ("name taken", 4, 6), ("long wait", 6, 10)], seed=1222)


def test_a_run_whose_first_attempt_is_refused_has_not_started() -> None:
    world = World(seed=956)
    world.api.refusals.append(Refusal(world.mark(), "webhook", "ConfigMap"))
    world.calm(3)
    assert (world.status["phase"], world.status.get("attempt", 0)) == ("Pending", 0)
    replay([("refused", 6, 3), ("calm", 10, 4)], seed=956)


def test_an_attempt_that_was_made_unseen_goes_on_record_although_a_service_is_refused() -> None:
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
def test_an_attempt_that_was_never_put_on_record_is_although_admission_refuses_what_it_has(restarted: bool) -> None:
    """Its failures would be seen by nobody."""
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
def test_a_run_whose_resumption_is_refused_stays_suspended_and_nothing_has_failed(kind: str) -> None:
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


def test_a_part_whose_repair_and_its_event_were_lost_is_not_applied_once_more() -> None:
    """The cache still lacks it; the API server, asked to make it, has it: it is as it was made, perhaps by another release."""
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
