"""GPU time of a run: what is counted equals what its pods held, and every part of it is one of the sum."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rlrun.protocol.messages.lease_annotations import EngineLoad
from rlrun_operator.decide.gpu_time_split import ATTEMPTS_KEPT, COUNT_SECONDS
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.state_machine import decide
from rlrun_operator.names import Ref
from rlrun_operator.reconcile.admissions import stage_of
from rlrun_operator.state import Admission
from rlrun_operator.status import reasons
from rlrun_operator.times import rfc3339, seconds_of
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_shared import HOST, a_guest, a_host, tick

GPUS = 2
SPEC: dict[str, Any] = {
    "trainer": {"replicas": 2, "gpusPerReplica": GPUS},
    "inference": {"replicas": 2, "gpusPerReplica": 1, "minAvailable": 1},
    "orchestrator": {},
}
TRAINERS, ENGINES = 4, 2


def load(waited: float, idle: float) -> str:
    return EngineLoad(
        engines=2, seconds=120, steps=2, waited=waited, ahead=idle, idle=idle, busy=1 - idle, requests=1, waiting=0
    ).text()


def cost(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.status["cost"]
    rows = [row["gpuSeconds"] for row in found["attempts"]]
    sums: dict[str, int] = {}
    for row in rows:
        for use, seconds in row.items():
            sums[use] = sums.get(use, 0) + seconds
    assert sums == found["gpuSeconds"], "the parts by attempt and role are those of the whole"
    assert found["gpuHours"] == round(sum(sums.values()) / 3600, 4)
    return found


def uses(kube: Kube, role: str | None = None) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in cost(kube)["attempts"]:
        if role in (None, row["role"]):
            for use, seconds in row["gpuSeconds"].items():
                found[use] = found.get(use, 0) + seconds
    return found


def total(kube: Kube) -> int:
    return sum(cost(kube)["gpuSeconds"].values())


def held(kube: Kube) -> int:
    """GPUs that go on being counted."""
    return sum(int(pod.split("/")[2]) for pod in cost(kube)["pods"])


def counted_to(kube: Kube) -> float:
    found = seconds_of(cost(kube)["countedTo"])
    assert found is not None
    return found


def run_for(kube: Kube, seconds: int, step: int, every: int = 20, **more: object) -> None:
    for _ in range(0, seconds, every):
        kube.tick(every)
        kube.report(step, **more)
        kube.tick(0)


def test_a_run_without_gpus_has_no_cost() -> None:
    kube = Kube({"trainer": {"gpusPerReplica": 0}, "inference": {"gpusPerReplica": 0}}).start()
    assert "cost" not in kube.status


def test_what_is_counted_is_what_pods_with_a_node_hold() -> None:
    kube = Kube(SPEC).start()
    began = kube.now - 2
    run_for(kube, 600, 4)
    assert kube.now - counted_to(kube) < COUNT_SECONDS
    assert total(kube) == (counted_to(kube) - began) * (TRAINERS + ENGINES)
    assert {row["role"] for row in cost(kube)["attempts"]} == {"trainer", "inference"}, "the orchestrator has no GPU"
    assert uses(kube)["startup"] == 2 * TRAINERS + 2 * ENGINES, "from node to the first step"


def test_what_was_trained_is_divided_by_the_same_time() -> None:
    kube = Kube(SPEC).start()
    assert "trained" not in cost(kube)
    run_for(kube, 600, 4, trained="90000 640")
    found = cost(kube)
    assert found["trained"] == {"tokens": 90000, "samples": 640}
    hours = sum(found["gpuSeconds"].values()) / 3600
    assert found["perGpuHour"]["tokens"] == pytest.approx(90000 / hours, rel=1e-3)
    run_for(kube, 600, 5, trained="1e9 -3")
    later = cost(kube)
    assert later["trained"] == found["trained"], "words that nobody can read leave what is known"
    assert later["perGpuHour"]["tokens"] < found["perGpuHour"]["tokens"], "time goes on"


def test_a_pod_that_waits_for_a_node_costs_nothing() -> None:
    kube = Kube(SPEC)
    kube.schedule = False
    kube.settle()
    run_for(kube, 300, 0)
    assert "cost" not in kube.status
    kube.schedule = True
    kube.settle()
    bound = kube.now
    for pod in (*kube.pods("trainer"), *kube.pods("inference")):
        pod["status"]["conditions"].append(
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(bound)}
        )
    kube.tick(100)
    kube.report(1)
    kube.tick(0)
    assert total(kube) <= 100 * (TRAINERS + ENGINES) + 300 * (TRAINERS + ENGINES)  # the fake's pods are bound at once


def test_waits_are_divided_as_the_orchestrator_measures_them() -> None:
    kube = Kube(SPEC).start()
    began = counted_to(kube)
    run_for(kube, 1000, 4, engines=load(0.3, 0.1))
    passed = counted_to(kube) - began
    trainer, engines = uses(kube, "trainer"), uses(kube, "inference")
    assert trainer["waitedForRollouts"] == pytest.approx(0.3 * passed * TRAINERS, abs=TRAINERS)
    assert engines["waitedForTrainer"] == pytest.approx(0.1 * passed * ENGINES, abs=ENGINES)


@pytest.mark.parametrize("every", [3, 7, 45])
def test_shares_do_not_depend_on_how_often_time_is_counted(every: int) -> None:
    kube = Kube(SPEC).start()
    for number in range(315 // every):
        kube.tick(every)
        kube.report(4 + number, engines=load(0.13, 0.0))
        kube.tick(0)
    passed = every * (315 // every)
    assert uses(kube, "trainer")["waitedForRollouts"] == pytest.approx(0.13 * passed * TRAINERS, abs=3 * TRAINERS)


def test_steps_that_a_restart_had_lost_are_repeated() -> None:
    kube = Kube(SPEC).start(10)
    run_for(kube, 100, 10)
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick(1)
    assert kube.status["attempt"] == 2
    kube.report(5, resumed=5)
    kube.tick(10)
    kube.report(6, resumed=5)
    kube.tick(0)
    assert "repeated" not in uses(kube), "until its first step it starts up"
    began = total(kube)
    for step in range(7, 13):
        kube.tick(10)
        kube.report(step, resumed=5)
        kube.tick(0)
    assert uses(kube)["repeated"] == 4 * 10 * (TRAINERS + ENGINES), "steps 7 to 10; 11 and 12 are new"
    assert total(kube) == began + 60 * (TRAINERS + ENGINES)


def test_an_operator_that_was_away_loses_no_hour_and_counts_none_twice() -> None:
    kube = Kube(SPEC).start()
    before = total(kube)
    counted = seconds_of(cost(kube)["countedTo"])
    kube.now += 3600
    kube.new_operator()
    kube.tick(0)
    assert counted is not None
    assert total(kube) - before == (kube.now - counted) * (TRAINERS + ENGINES)
    again = total(kube)
    kube.new_operator()
    kube.tick(0)
    assert total(kube) == again


def test_a_pod_that_ended_while_nobody_looked_is_counted_to_the_end_that_it_shows() -> None:
    kube = Kube({**SPEC, "inference": {"replicas": 1, "gpusPerReplica": 1}}).start()
    before, began = total(kube), kube.now
    kube.pod("trainer", 1)["status"] |= {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "trainer", "state": {"terminated": {"exitCode": 1, "finishedAt": rfc3339(kube.now + 600)}}}
        ],
    }
    kube.now += 3600
    kube.do(kube.decide())
    assert total(kube) - before == 600 * GPUS + 3600 * (GPUS + 1)
    kube.settle()
    assert total(kube) - before == 600 * GPUS + 3600 * (GPUS + 1), "not once more when it is removed"
    assert kube.now == began + 3600


def test_a_pod_that_vanished_while_nobody_looked_is_counted_to_the_end_of_its_grace_period() -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {"inference"}
    kube.delete(kube.ref("inference"))
    kube.tick(1)
    before, began = total(kube), kube.now
    kube.lingering = set()
    del kube.objects[kube.ref("inference")]
    kube.now += 3600
    kube.do(kube.decide())
    grace = 29  # of 30 seconds, one has passed
    assert total(kube) - before == 3600 * (TRAINERS + 1) + grace
    assert kube.now == began + 3600


def test_engines_that_come_and_go_are_counted_while_they_are_there() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 60, 4)
    kube.edit(inference={**SPEC["inference"], "replicas": 5})
    kube.tick(0)
    before = total(kube)
    run_for(kube, 120, 4)
    kube.edit(inference={**SPEC["inference"], "replicas": 1})
    kube.tick(0)
    assert total(kube) - before == 120 * (TRAINERS + 5)
    run_for(kube, 60, 4)
    assert total(kube) - before == 120 * (TRAINERS + 5) + 60 * (TRAINERS + 1)


def test_a_suspended_run_costs_nothing() -> None:
    kube = Kube(SPEC).start()
    kube.edit(suspend=True)
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Suspended"
    before = kube.status["cost"]
    assert held(kube) == 0
    kube.tick(3600)
    assert kube.status["cost"] == before
    kube.edit(suspend=False)
    kube.tick()
    assert held(kube) == TRAINERS + ENGINES


def test_saving_is_called_stopping() -> None:
    kube = Kube(SPEC).start()
    kube.edit(suspend=True)
    kube.lingering = {"trainer", "orchestrator"}
    kube.tick()
    before = uses(kube).get("stopping", 0)
    kube.tick(20)
    kube.lingering = set()
    kube.tick(0)
    assert uses(kube)["stopping"] - before == 20 * (TRAINERS + ENGINES)


def test_a_pod_that_is_gone_is_not_counted_anew_by_an_operator_that_still_sees_it() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 100, 4)
    stale = kube.look()
    kube.edit(inference={**SPEC["inference"], "replicas": 1})
    kube.tick(0)
    before, began = total(kube), counted_to(kube)
    kube.now += 10
    seen = replace(stale, run=kube.look().run)
    kube.do(decide(seen, kube.now, settings=kube.settings, fresh_key="k" * 32, random=0.5))
    kube.settle()
    assert total(kube) - before <= (counted_to(kube) - began) * (TRAINERS + ENGINES)


def test_a_clock_that_is_set_back_counts_nothing_twice_and_goes_on() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    before = total(kube)
    kube.now -= 7200
    kube.tick(0)
    assert total(kube) == before
    run_for(kube, 120, 4)
    assert total(kube) - before == 120 * (TRAINERS + ENGINES)


def test_the_clocks_of_two_operators_may_differ_a_little() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    before, began = total(kube), counted_to(kube)
    kube.now = began - 30
    kube.tick(0)
    assert (total(kube), counted_to(kube)) == (before, began)
    run_for(kube, 120, 4)
    assert total(kube) - before == (counted_to(kube) - began) * (TRAINERS + ENGINES), "the 30 s are counted already"


def test_time_is_counted_once_a_minute_where_nothing_changes() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    writes = len(kube.writes)
    for _ in range(COUNT_SECONDS):
        kube.tick(5)
    assert len(kube.writes) - writes <= 5 + 1


def test_old_attempts_are_one_row_and_nothing_is_lost() -> None:
    kube = Kube({**SPEC, "failurePolicy": {"maxRestarts": 50}}).start(1)
    for number in range(2, ATTEMPTS_KEPT + 5):
        kube.disrupt("trainer")
        kube.tick()
        kube.tick(30)
        kube.report(number, resumed=number - 1)
        kube.tick()
    attempts = {row["attempt"] for row in cost(kube)["attempts"]}
    assert (0 in attempts, len(attempts)) == (True, ATTEMPTS_KEPT + 1)


@pytest.mark.parametrize(
    "written",
    [
        {"countedTo": "nonsense", "pods": [], "attempts": []},
        {"countedTo": "2023-11-14T22:13:20Z", "pods": ["", "a/b/c", "x/trainer/999999999999", "y/trainer/1/z"]},
        {
            "countedTo": "2023-11-14T22:13:20Z",
            "attempts": [{"attempt": -1, "role": "trainer", "gpuSeconds": {"a": 2**60}}],
        },
        {"gpuHours": "many"},
    ],
)
def test_a_record_that_somebody_else_wrote_ends_no_pass(written: dict[str, Any]) -> None:
    kube = Kube(SPEC).start()
    kube.run["status"] = json.loads(json.dumps({**kube.status, "cost": written}))
    kube.tick()
    assert total(kube) < 1000


def test_gpus_of_a_colocated_run_are_the_trainers_and_counted_once() -> None:
    engines = {"gpusPerReplica": 4, "dataParallel": 4}
    spec = {"trainer": {"gpusPerReplica": 4}, "inference": engines, "placement": {"colocate": True}}
    kube = Kube({**spec, "algorithm": {"maxAsyncLevel": 0}}).start()
    began = counted_to(kube)
    before = total(kube)
    run_for(kube, 300, 4, engines=load(0.5, 0.5))
    assert {row["role"] for row in cost(kube)["attempts"]} == {"trainer"}
    assert total(kube) - before == 4 * (counted_to(kube) - began)
    assert "waitedForRollouts" not in uses(kube), "they make the rollouts meanwhile"


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/mig-3g.40gb", "example.com/accelerator"])
def test_what_the_run_names_is_counted(resource: str) -> None:
    kube = Kube({**SPEC, "placement": {"gpuResource": resource}}).start()
    assert held(kube) == TRAINERS + ENGINES


def test_a_guest_has_no_gpus_and_its_host_counts_them_once() -> None:
    host = a_host({"trainer": {**HOST["trainer"], "gpusPerReplica": 2}}).start()
    guest = a_guest(host)
    tick(host, guest)
    guest.start()
    tick(host, guest, seconds=100)
    assert total(host) >= 100 * 2
    assert "cost" not in guest.status


# ---- the budget


def in_budget(gpu_hours: float) -> Kube:
    return Kube({**SPEC, "budget": {"gpuHours": gpu_hours}}).start(7)


def test_most_of_a_budget_is_warned_of_and_all_of_it_suspends() -> None:
    kube = in_budget(1.0)  # 600 s of 6 GPUs
    kube.report(7, checkpoint_step=7)
    assert kube.condition("WithinBudget")["reason"] == "BudgetLeft"
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake <= 480
    run_for(kube, 480, 7, checkpoint_step=7)
    assert kube.condition("WithinBudget")["reason"] == "BudgetNearlySpent"
    assert ("Warning", "BudgetNearlySpent") in kube.told
    assert kube.status["phase"] == "Running"
    run_for(kube, 120, 7, checkpoint_step=7)
    assert (kube.status["phase"], kube.status["reason"]) == ("Suspended", "BudgetSpent")
    assert "raise budget.gpuHours" in kube.status["message"]
    assert "checkpoint of step 7" in kube.condition("Suspended")["message"]
    assert "budget.gpuHours is more than the 1" in kube.condition("Suspended")["message"]
    assert ("Warning", "BudgetSpent") in kube.told
    assert kube.run["spec"].get("suspend") is None, "nobody edits the specification"
    kube.tick(3600)
    assert kube.status["phase"] == "Suspended", "what is spent never falls"
    assert total(kube) <= 3600 + 20 * (TRAINERS + ENGINES)


def test_a_run_goes_on_by_itself_once_its_budget_is_raised_or_removed() -> None:
    for change in ({"gpuHours": 5.0}, None):
        kube = in_budget(0.1)
        run_for(kube, 120, 7)
        assert kube.status["phase"] == "Suspended"
        kube.edit(budget=change)
        kube.tick()
        assert (kube.status["phase"], kube.status["attempt"], kube.status["restarts"]) == ("Starting", 2, 0)
        assert bool(kube.condition("WithinBudget")) == (change is not None)


def test_a_run_whose_budget_is_spent_holds_no_room_in_the_queue() -> None:
    kube = Kube({**SPEC, "budget": {"gpuHours": 0.1}})
    kube.admission = Admission(True, reasons.ROOM_FOUND, "there is room for all pods of the run")
    kube.start(7)
    run_for(kube, 120, 7)
    assert kube.status["phase"] == "Suspended"
    assert (kube.condition("Admitted")["status"], kube.condition("Admitted")["reason"]) == ("False", "NotQueued")
    assert "queue" not in kube.status, "it does not wait for its turn"
    case = RunSnapshot(kube.look(), kube.now, kube.settings, "", 0.0)
    assert stage_of(case) is None
    kube.edit(budget={"gpuHours": 5.0})
    assert stage_of(RunSnapshot(kube.look(), kube.now, kube.settings, "", 0.0)) == "waiting"
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Starting"


def test_a_user_who_suspends_beside_a_spent_budget_is_heeded() -> None:
    kube = in_budget(0.1)
    run_for(kube, 120, 7)
    kube.edit(suspend=True)
    kube.tick()
    kube.edit(budget={"gpuHours": 5.0})
    kube.tick()
    assert (kube.status["phase"], kube.status["reason"]) == ("Suspended", "Suspended")
    kube.edit(suspend=False)
    kube.tick()
    assert kube.status["phase"] == "Starting"


def test_a_run_that_is_complete_stays_complete_whatever_its_budget() -> None:
    kube = in_budget(0.1)
    kube.run["spec"]["maxSteps"] = 7
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Complete"
    kube.edit(budget={"gpuHours": 0.0001})
    kube.tick(100)
    assert kube.status["phase"] == "Complete"


def test_the_end_of_a_budget_comes_although_nothing_happens() -> None:
    kube = in_budget(1.0)
    waited = 0.0
    while kube.status["phase"] == "Running" and waited < 1200:
        step = kube.decide().wake_in
        assert step is not None
        kube.now += step
        waited += step
        kube.report(7)
        kube.settle()
    assert waited <= 610


def test_no_engine_is_left_when_the_budget_ends_between_two_attempts() -> None:
    kube = in_budget(0.3)
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick(400)
    kube.tick()
    assert (kube.status["phase"], [ref for ref in kube.objects if ref.kind == "Pod"]) == ("Suspended", [])
    assert Ref("Deployment", "run-inference") not in kube.objects
