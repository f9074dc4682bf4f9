"""Autoscaling of a run's engines: choices are recorded before they are applied, and an engine is drained before its removal."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.protocol.messages.lease_annotations import EngineLoad
from rlrun_operator.decide.engine_count import DELETION_COST
from rlrun_operator.names import Ref
from rlrun_operator.status import run_progress
from tests.unit.operator.decide.kube import Kube

AUTOSCALE = {"min": 2, "max": 6}
SPEC: dict[str, Any] = {"inference": {"autoscale": AUTOSCALE}}
DEPLOYMENT, LEASE = Ref("Deployment", "run-inference"), Ref("Lease", "run-progress")


def load_text(engines: int, *, waited: float = 0.0, idle: float = 0.0, seconds: float = 300.0) -> str:
    found = EngineLoad(
        engines=engines,
        seconds=seconds,
        steps=5,
        waited=waited,
        ahead=idle,
        idle=idle,
        busy=1 - idle,
        requests=50,
        waiting=0,
    )
    return found.text()


def start_run(spec: dict[str, Any] = SPEC) -> Kube:
    kube = Kube(spec).start()
    set_addresses(kube)
    return kube


def set_addresses(kube: Kube) -> None:
    """Give each engine an address derived from its name."""
    for pod in kube.pods("inference"):
        pod["status"]["podIP"] = get_engine_address(str(pod["metadata"]["name"]))


def get_engine_address(name: str) -> str:
    return f"10.0.0.{int(name.rpartition('-')[2]) + 1}"


def count_engines(kube: Kube) -> int:
    return int(kube.objects[DEPLOYMENT]["spec"]["replicas"])


def read_wanted_engines(kube: Kube) -> str | None:
    return (kube.objects[LEASE]["metadata"].get("annotations") or {}).get(keys.ENGINES_WANTED)


def report_engines(kube: Kube, step: int, text: str | None, drained: str = "") -> None:
    """Report as the orchestrator and let the operator act."""
    kube.report(step, engines=text, engines_drained=drained)
    kube.tick()
    set_addresses(kube)


def test_run_starts_with_fewest_engines_and_grows() -> None:
    kube = start_run()
    assert (count_engines(kube), kube.status["inferenceReady"]) == (2, "2/2")
    report_engines(kube, 2, load_text(2, waited=0.5))
    assert count_engines(kube) == 4
    assert kube.status["inference"]["reason"].startswith("with 2 engines the trainer waited for rollouts 50%")
    assert ("Normal", "InferenceScaled") in kube.told
    assert "2 to 4 engines: with 2 engines the trainer waited" in kube.messages[-1]
    report_engines(kube, 3, load_text(2, waited=0.5))
    assert count_engines(kube) == 4, "what was measured before the change does not count twice"
    report_engines(kube, 9, load_text(4, waited=0.9))
    assert count_engines(kube) == 6, "never more than max"
    assert read_wanted_engines(kube) == "6"


def test_recorded_engine_choice_survives_an_operator_restart() -> None:
    kube = start_run()
    kube.report(2, engines=load_text(2, waited=0.5), engines_drained="")
    kube.now += 1
    first = kube.decide()
    assert (first.scale, first.status["inference"]["desired"]) == ((), 4)
    kube.do(first)
    kube.new_operator()
    (scale,) = kube.decide().scale
    assert (scale.ref, scale.replicas) == (DEPLOYMENT, 4)
    kube.settle()
    report_engines(kube, 3, None)
    kube.new_operator()
    kube.tick()
    assert count_engines(kube) == 4, "a restart resets nothing"


def test_drained_engine_is_removed_first() -> None:
    kube = start_run({"inference": {"autoscale": {"min": 1, "max": 4}}})
    for number, step in ((2, 2), (4, 4)):
        report_engines(kube, step, load_text(number // 2, waited=0.6))
    assert count_engines(kube) == 4
    report_engines(kube, 6, load_text(4, idle=0.4))
    assert (count_engines(kube), kube.status["inference"]["desired"], read_wanted_engines(kube)) == (4, 3, "3")
    report_engines(kube, 7, load_text(4, idle=0.4))
    assert (count_engines(kube), kube.status["inference"]["desired"]) == (4, 3), "nothing goes before it is drained"
    report_engines(kube, 8, None, drained=f"{get_engine_address('run-inference-1')} 10.9.9.9 nonsense")
    assert count_engines(kube) == 3
    assert sorted(pod["metadata"]["name"] for pod in kube.pods("inference")) == [
        "run-inference-0",
        "run-inference-2",
        "run-inference-3",
    ]
    assert not [p for p in kube.pods("inference") if DELETION_COST in (p["metadata"].get("annotations") or {})]


def test_orchestrator_receives_the_window_of_its_measurements() -> None:
    kube = start_run({"inference": {"autoscale": AUTOSCALE | {"stabilizationSeconds": 77}}})
    report_engines(kube, 2, load_text(2))
    assert float(kube.objects[LEASE]["metadata"]["annotations"][keys.ENGINES_WINDOW]) == 77


def test_failed_engine_is_removed_without_drain() -> None:
    kube = start_run({"inference": {"autoscale": {"min": 1, "max": 4}}})
    report_engines(kube, 2, load_text(1, waited=0.6))
    assert count_engines(kube) == 2
    report_engines(kube, 4, load_text(2, idle=0.6))
    assert count_engines(kube) == 2
    kube.exit("inference", 1, index=0)
    kube.make_ready = False
    kube.tick()
    assert count_engines(kube) == 1


@pytest.mark.parametrize("silence", ["none", "stale"])
def test_silent_run_keeps_its_engines(silence: str) -> None:
    kube = start_run()
    report_engines(kube, 2, load_text(2, waited=0.5))
    if silence == "none":
        report_engines(kube, 3, None)
        kube.tick(3600)
        assert count_engines(kube) == 4
    else:
        kube.report(3, engines=load_text(4, idle=0.9), engines_drained="10.0.0.1 10.0.0.2 10.0.0.3")
        kube.now += run_progress.HEARTBEAT_SECONDS
        kube.settle()
        assert (count_engines(kube), kube.status["inference"]["desired"]) == (4, 4)


def test_next_attempt_keeps_the_engine_count() -> None:
    kube = start_run()
    report_engines(kube, 2, load_text(2, waited=0.5))
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], count_engines(kube), len(kube.pods("inference"))) == (2, 4, 4)
    assert kube.status["inference"]["desired"] == 4


def test_edited_bounds_are_applied_with_a_drain() -> None:
    kube = start_run()
    report_engines(kube, 2, load_text(2, waited=0.5))
    kube.edit(inference={"autoscale": {"min": 5, "max": 6}})
    kube.tick()
    assert count_engines(kube) == 5
    kube.edit(inference={"autoscale": {"min": 1, "max": 3}})
    set_addresses(kube)
    report_engines(kube, 3, load_text(5))
    assert (count_engines(kube), kube.status["inference"]["desired"], read_wanted_engines(kube)) == (5, 3, "3")
    report_engines(
        kube,
        4,
        load_text(5),
        drained=f"{get_engine_address('run-inference-3')} {get_engine_address('run-inference-4')}",
    )
    assert count_engines(kube) == 3


def test_manual_scale_down_drains_unless_orchestrator_is_silent() -> None:
    kube = start_run({"inference": {"replicas": 3}})
    assert read_wanted_engines(kube) is None
    kube.edit(inference={"replicas": 2})
    report_engines(kube, 2, None)
    assert (count_engines(kube), read_wanted_engines(kube)) == (3, "2")
    report_engines(kube, 3, None, drained=get_engine_address("run-inference-0"))
    assert count_engines(kube) == 2
    assert "run-inference-0" not in [pod["metadata"]["name"] for pod in kube.pods("inference")]
    kube.edit(inference={"replicas": 1})
    kube.report(4, engines_drained="")
    kube.now += run_progress.HEARTBEAT_SECONDS
    kube.settle()
    assert count_engines(kube) == 1, "a person's edit does not wait for a silent orchestrator"


def test_old_orchestrator_without_drain_is_not_waited_for() -> None:
    kube = start_run({"inference": {"replicas": 3}})
    kube.edit(inference={"replicas": 2})
    kube.report(2)
    kube.tick()
    assert (count_engines(kube), read_wanted_engines(kube)) == (2, None)


def test_drain_budget_counts_the_minimum_of_engines() -> None:
    kube = start_run({"inference": {"autoscale": {"min": 3, "max": 6}, "minAvailable": 2}})
    budget = kube.objects[Ref("PodDisruptionBudget", "run-inference")]
    assert budget["spec"]["maxUnavailable"] == 1
    assert kube.status["inference"]["selector"] == "rlrun.io/run=run,rlrun.io/role=inference"
