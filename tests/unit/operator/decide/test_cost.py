"""GPU time of a run: total, uses and budget match the GPUs that its pods hold."""

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
from rlrun_operator.times import format_rfc3339, seconds_of
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_shared import HOST, make_guest, make_host, tick

GPUS = 2
SPEC: dict[str, Any] = {
    "trainer": {"replicas": 2, "gpusPerReplica": GPUS},
    "inference": {"replicas": 2, "gpusPerReplica": 1, "minAvailable": 1},
    "orchestrator": {},
}
TRAINERS, ENGINES = 4, 2


def load_text(waited: float, idle: float) -> str:
    return EngineLoad(
        engines=2, seconds=120, steps=2, waited=waited, ahead=idle, idle=idle, busy=1 - idle, requests=1, waiting=0
    ).text()


def read_cost(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.status["cost"]
    rows = [row["gpuSeconds"] for row in found["attempts"]]
    sums: dict[str, int] = {}
    for row in rows:
        for use, seconds in row.items():
            sums[use] = sums.get(use, 0) + seconds
    assert sums == found["gpuSeconds"], "the parts by attempt and role are those of the whole"
    assert found["gpuHours"] == round(sum(sums.values()) / 3600, 4)
    return found


def sum_uses(kube: Kube, role: str | None = None) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in read_cost(kube)["attempts"]:
        if role in (None, row["role"]):
            for use, seconds in row["gpuSeconds"].items():
                found[use] = found.get(use, 0) + seconds
    return found


def sum_cost(kube: Kube) -> int:
    return sum(read_cost(kube)["gpuSeconds"].values())


def count_held_gpus(kube: Kube) -> int:
    """Number of GPUs that are currently counted."""
    return sum(int(pod.split("/")[2]) for pod in read_cost(kube)["pods"])


def read_counted_to(kube: Kube) -> float:
    found = seconds_of(read_cost(kube)["countedTo"])
    assert found is not None
    return found


def run_for(kube: Kube, seconds: int, step: int, every: int = 20, **more: object) -> None:
    for _ in range(0, seconds, every):
        kube.tick(every)
        kube.report(step, **more)
        kube.tick(0)


def test_run_without_gpus_has_no_cost() -> None:
    kube = Kube({"trainer": {"gpusPerReplica": 0}, "inference": {"gpusPerReplica": 0}}).start()
    assert "cost" not in kube.status


def test_cost_counts_gpus_of_pods_with_a_node() -> None:
    kube = Kube(SPEC).start()
    began = kube.now - 2
    run_for(kube, 600, 4)
    assert kube.now - read_counted_to(kube) < COUNT_SECONDS
    assert sum_cost(kube) == (read_counted_to(kube) - began) * (TRAINERS + ENGINES)
    assert {row["role"] for row in read_cost(kube)["attempts"]} == {"trainer", "inference"}, (
        "the orchestrator has no GPU"
    )
    assert sum_uses(kube)["startup"] == 2 * TRAINERS + 2 * ENGINES, "from node to the first step"


def test_trained_tokens_are_divided_by_counted_gpu_hours() -> None:
    kube = Kube(SPEC).start()
    assert "trained" not in read_cost(kube)
    run_for(kube, 600, 4, trained="90000 640")
    found = read_cost(kube)
    assert found["trained"] == {"tokens": 90000, "samples": 640}
    hours = sum(found["gpuSeconds"].values()) / 3600
    assert found["perGpuHour"]["tokens"] == pytest.approx(90000 / hours, rel=1e-3)
    run_for(kube, 600, 5, trained="1e9 -3")
    later = read_cost(kube)
    assert later["trained"] == found["trained"], "words that nobody can read leave what is known"
    assert later["perGpuHour"]["tokens"] < found["perGpuHour"]["tokens"], "time goes on"


def test_pod_without_node_costs_nothing() -> None:
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
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_rfc3339(bound)}
        )
    kube.tick(100)
    kube.report(1)
    kube.tick(0)
    assert sum_cost(kube) <= 100 * (TRAINERS + ENGINES) + 300 * (
        TRAINERS + ENGINES
    )  # pods of the in-memory cluster are bound immediately


def test_waiting_time_is_divided_as_measured_by_orchestrator() -> None:
    kube = Kube(SPEC).start()
    began = read_counted_to(kube)
    run_for(kube, 1000, 4, engines=load_text(0.3, 0.1))
    passed = read_counted_to(kube) - began
    trainer, engines = sum_uses(kube, "trainer"), sum_uses(kube, "inference")
    assert trainer["waitedForRollouts"] == pytest.approx(0.3 * passed * TRAINERS, abs=TRAINERS)
    assert engines["waitedForTrainer"] == pytest.approx(0.1 * passed * ENGINES, abs=ENGINES)


@pytest.mark.parametrize("every", [3, 7, 45])
def test_use_shares_do_not_depend_on_counting_interval(every: int) -> None:
    kube = Kube(SPEC).start()
    for number in range(315 // every):
        kube.tick(every)
        kube.report(4 + number, engines=load_text(0.13, 0.0))
        kube.tick(0)
    passed = every * (315 // every)
    assert sum_uses(kube, "trainer")["waitedForRollouts"] == pytest.approx(0.13 * passed * TRAINERS, abs=3 * TRAINERS)


def test_steps_lost_by_restart_are_counted_as_repeated() -> None:
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
    assert "repeated" not in sum_uses(kube), "until its first step it starts up"
    began = sum_cost(kube)
    for step in range(7, 13):
        kube.tick(10)
        kube.report(step, resumed=5)
        kube.tick(0)
    assert sum_uses(kube)["repeated"] == 4 * 10 * (TRAINERS + ENGINES), "steps 7 to 10; 11 and 12 are new"
    assert sum_cost(kube) == began + 60 * (TRAINERS + ENGINES)


def test_absent_operator_counts_the_missed_time_once() -> None:
    kube = Kube(SPEC).start()
    before = sum_cost(kube)
    counted = seconds_of(read_cost(kube)["countedTo"])
    kube.now += 3600
    kube.new_operator()
    kube.tick(0)
    assert counted is not None
    assert sum_cost(kube) - before == (kube.now - counted) * (TRAINERS + ENGINES)
    again = sum_cost(kube)
    kube.new_operator()
    kube.tick(0)
    assert sum_cost(kube) == again


def test_ended_pod_is_counted_up_to_its_reported_end() -> None:
    kube = Kube({**SPEC, "inference": {"replicas": 1, "gpusPerReplica": 1}}).start()
    before, began = sum_cost(kube), kube.now
    kube.pod("trainer", 1)["status"] |= {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "trainer", "state": {"terminated": {"exitCode": 1, "finishedAt": format_rfc3339(kube.now + 600)}}}
        ],
    }
    kube.now += 3600
    kube.do(kube.decide())
    assert sum_cost(kube) - before == 600 * GPUS + 3600 * (GPUS + 1)
    kube.settle()
    assert sum_cost(kube) - before == 600 * GPUS + 3600 * (GPUS + 1), "not once more when it is removed"
    assert kube.now == began + 3600


def test_vanished_pod_is_counted_up_to_its_grace_period() -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {"inference"}
    kube.delete(kube.ref("inference"))
    kube.tick(1)
    before, began = sum_cost(kube), kube.now
    kube.lingering = set()
    del kube.objects[kube.ref("inference")]
    kube.now += 3600
    kube.do(kube.decide())
    grace = 29  # one of 30 seconds has passed
    assert sum_cost(kube) - before == 3600 * (TRAINERS + 1) + grace
    assert kube.now == began + 3600


def test_scaled_engines_are_counted_while_they_exist() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 60, 4)
    kube.edit(inference={**SPEC["inference"], "replicas": 5})
    kube.tick(0)
    before = sum_cost(kube)
    run_for(kube, 120, 4)
    kube.edit(inference={**SPEC["inference"], "replicas": 1})
    kube.tick(0)
    assert sum_cost(kube) - before == 120 * (TRAINERS + 5)
    run_for(kube, 60, 4)
    assert sum_cost(kube) - before == 120 * (TRAINERS + 5) + 60 * (TRAINERS + 1)


def test_suspended_run_costs_nothing() -> None:
    kube = Kube(SPEC).start()
    kube.edit(suspend=True)
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Suspended"
    before = kube.status["cost"]
    assert count_held_gpus(kube) == 0
    kube.tick(3600)
    assert kube.status["cost"] == before
    kube.edit(suspend=False)
    kube.tick()
    assert count_held_gpus(kube) == TRAINERS + ENGINES


def test_saving_time_is_counted_as_stopping() -> None:
    kube = Kube(SPEC).start()
    kube.edit(suspend=True)
    kube.lingering = {"trainer", "orchestrator"}
    kube.tick()
    before = sum_uses(kube).get("stopping", 0)
    kube.tick(20)
    kube.lingering = set()
    kube.tick(0)
    assert sum_uses(kube)["stopping"] - before == 20 * (TRAINERS + ENGINES)


def test_removed_pod_is_not_counted_again_from_stale_view() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 100, 4)
    stale = kube.look()
    kube.edit(inference={**SPEC["inference"], "replicas": 1})
    kube.tick(0)
    before, began = sum_cost(kube), read_counted_to(kube)
    kube.now += 10
    seen = replace(stale, run=kube.look().run)
    kube.do(decide(seen, kube.now, settings=kube.settings, fresh_key="k" * 32, random=0.5))
    kube.settle()
    assert sum_cost(kube) - before <= (read_counted_to(kube) - began) * (TRAINERS + ENGINES)


def test_clock_set_back_counts_no_time_twice() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    before = sum_cost(kube)
    kube.now -= 7200
    kube.tick(0)
    assert sum_cost(kube) == before
    run_for(kube, 120, 4)
    assert sum_cost(kube) - before == 120 * (TRAINERS + ENGINES)


def test_clock_difference_of_operators_counts_no_time_twice() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    before, began = sum_cost(kube), read_counted_to(kube)
    kube.now = began - 30
    kube.tick(0)
    assert (sum_cost(kube), read_counted_to(kube)) == (before, began)
    run_for(kube, 120, 4)
    assert sum_cost(kube) - before == (read_counted_to(kube) - began) * (TRAINERS + ENGINES), (
        "the 30 s are counted already"
    )


def test_idle_run_writes_its_cost_once_a_minute() -> None:
    kube = Kube(SPEC).start()
    run_for(kube, 120, 4)
    writes = len(kube.writes)
    for _ in range(COUNT_SECONDS):
        kube.tick(5)
    assert len(kube.writes) - writes <= 5 + 1


def test_old_attempts_are_merged_into_one_row() -> None:
    kube = Kube({**SPEC, "failurePolicy": {"maxRestarts": 50}}).start(1)
    for number in range(2, ATTEMPTS_KEPT + 5):
        kube.disrupt("trainer")
        kube.tick()
        kube.tick(30)
        kube.report(number, resumed=number - 1)
        kube.tick()
    attempts = {row["attempt"] for row in read_cost(kube)["attempts"]}
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
def test_malformed_cost_record_does_not_fail_the_pass(written: dict[str, Any]) -> None:
    kube = Kube(SPEC).start()
    kube.run["status"] = json.loads(json.dumps({**kube.status, "cost": written}))
    kube.tick()
    assert sum_cost(kube) < 1000


def test_colocated_gpus_are_counted_once_as_trainer() -> None:
    engines = {"gpusPerReplica": 4, "dataParallel": 4}
    spec = {"trainer": {"gpusPerReplica": 4}, "inference": engines, "placement": {"colocate": True}}
    kube = Kube({**spec, "algorithm": {"maxAsyncLevel": 0}}).start()
    began = read_counted_to(kube)
    before = sum_cost(kube)
    run_for(kube, 300, 4, engines=load_text(0.5, 0.5))
    assert {row["role"] for row in read_cost(kube)["attempts"]} == {"trainer"}
    assert sum_cost(kube) - before == 4 * (read_counted_to(kube) - began)
    assert "waitedForRollouts" not in sum_uses(kube), "they make the rollouts meanwhile"


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/mig-3g.40gb", "example.com/accelerator"])
def test_cost_counts_the_configured_gpu_resource(resource: str) -> None:
    kube = Kube({**SPEC, "placement": {"gpuResource": resource}}).start()
    assert count_held_gpus(kube) == TRAINERS + ENGINES


def test_host_counts_shared_gpus_and_guest_has_none() -> None:
    host = make_host({"trainer": {**HOST["trainer"], "gpusPerReplica": 2}}).start()
    guest = make_guest(host)
    tick(host, guest)
    guest.start()
    tick(host, guest, seconds=100)
    assert sum_cost(host) >= 100 * 2
    assert "cost" not in guest.status


# ---- budget


def start_run_with_budget(gpu_hours: float) -> Kube:
    return Kube({**SPEC, "budget": {"gpuHours": gpu_hours}}).start(7)


def test_spent_budget_warns_first_and_then_suspends() -> None:
    kube = start_run_with_budget(1.0)  # 600 s of 6 GPUs
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
    assert sum_cost(kube) <= 3600 + 20 * (TRAINERS + ENGINES)


def test_raised_or_removed_budget_resumes_the_run() -> None:
    for change in ({"gpuHours": 5.0}, None):
        kube = start_run_with_budget(0.1)
        run_for(kube, 120, 7)
        assert kube.status["phase"] == "Suspended"
        kube.edit(budget=change)
        kube.tick()
        assert (kube.status["phase"], kube.status["attempt"], kube.status["restarts"]) == ("Starting", 2, 0)
        assert bool(kube.condition("WithinBudget")) == (change is not None)


def test_run_with_spent_budget_leaves_the_queue() -> None:
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


def test_manual_suspension_outlives_a_raised_budget() -> None:
    kube = start_run_with_budget(0.1)
    run_for(kube, 120, 7)
    kube.edit(suspend=True)
    kube.tick()
    kube.edit(budget={"gpuHours": 5.0})
    kube.tick()
    assert (kube.status["phase"], kube.status["reason"]) == ("Suspended", "Suspended")
    kube.edit(suspend=False)
    kube.tick()
    assert kube.status["phase"] == "Starting"


def test_complete_run_ignores_its_budget() -> None:
    kube = start_run_with_budget(0.1)
    kube.run["spec"]["maxSteps"] = 7
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.tick()
    assert kube.status["phase"] == "Complete"
    kube.edit(budget={"gpuHours": 0.0001})
    kube.tick(100)
    assert kube.status["phase"] == "Complete"


def test_budget_end_wakes_an_idle_run() -> None:
    kube = start_run_with_budget(1.0)
    waited = 0.0
    while kube.status["phase"] == "Running" and waited < 1200:
        step = kube.decide().wake_in
        assert step is not None
        kube.now += step
        waited += step
        kube.report(7)
        kube.settle()
    assert waited <= 610


def test_budget_end_between_attempts_deletes_engines() -> None:
    kube = start_run_with_budget(0.3)
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick(400)
    kube.tick()
    assert (kube.status["phase"], [ref for ref in kube.objects if ref.kind == "Pod"]) == ("Suspended", [])
    assert Ref("Deployment", "run-inference") not in kube.objects
