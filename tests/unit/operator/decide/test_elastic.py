"""Autoscaling of a run's engines: the choice is on record before it is acted on, and an engine goes only when nobody uses it."""

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


def load(engines: int, *, waited: float = 0.0, idle: float = 0.0, seconds: float = 300.0) -> str:
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


def begun(spec: dict[str, Any] = SPEC) -> Kube:
    kube = Kube(spec).start()
    with_addresses(kube)
    return kube


def with_addresses(kube: Kube) -> None:
    """Every engine has an address that its name says."""
    for pod in kube.pods("inference"):
        pod["status"]["podIP"] = address(str(pod["metadata"]["name"]))


def address(name: str) -> str:
    return f"10.0.0.{int(name.rpartition('-')[2]) + 1}"


def engines(kube: Kube) -> int:
    return int(kube.objects[DEPLOYMENT]["spec"]["replicas"])


def asked(kube: Kube) -> str | None:
    return (kube.objects[LEASE]["metadata"].get("annotations") or {}).get(keys.ENGINES_WANTED)


def says(kube: Kube, step: int, text: str | None, drained: str = "") -> None:
    """The orchestrator reports, and the operator acts on it."""
    kube.report(step, engines=text, engines_drained=drained)
    kube.tick()
    with_addresses(kube)


def test_a_run_begins_with_the_fewest_and_grows_while_its_trainer_waits() -> None:
    kube = begun()
    assert (engines(kube), kube.status["inferenceReady"]) == (2, "2/2")
    says(kube, 2, load(2, waited=0.5))
    assert engines(kube) == 4
    assert kube.status["inference"]["reason"].startswith("with 2 engines the trainer waited for rollouts 50%")
    assert ("Normal", "InferenceScaled") in kube.told
    assert "2 to 4 engines: with 2 engines the trainer waited" in kube.messages[-1]
    says(kube, 3, load(2, waited=0.5))
    assert engines(kube) == 4, "what was measured before the change does not count twice"
    says(kube, 9, load(4, waited=0.9))
    assert engines(kube) == 6, "never more than max"
    assert asked(kube) == "6"


def test_the_choice_is_on_record_before_it_is_acted_on_and_another_operator_goes_on_from_there() -> None:
    kube = begun()
    kube.report(2, engines=load(2, waited=0.5), engines_drained="")
    kube.now += 1
    first = kube.decide()
    assert (first.scale, first.status["inference"]["desired"]) == ((), 4)
    kube.do(first)
    kube.new_operator()
    (scale,) = kube.decide().scale
    assert (scale.ref, scale.replicas) == (DEPLOYMENT, 4)
    kube.settle()
    says(kube, 3, None)
    kube.new_operator()
    kube.tick()
    assert engines(kube) == 4, "a restart resets nothing"


def test_an_engine_goes_once_it_is_drained_and_it_is_that_one() -> None:
    kube = begun({"inference": {"autoscale": {"min": 1, "max": 4}}})
    for number, step in ((2, 2), (4, 4)):
        says(kube, step, load(number // 2, waited=0.6))
    assert engines(kube) == 4
    says(kube, 6, load(4, idle=0.4))
    assert (engines(kube), kube.status["inference"]["desired"], asked(kube)) == (4, 3, "3")
    says(kube, 7, load(4, idle=0.4))
    assert (engines(kube), kube.status["inference"]["desired"]) == (4, 3), "nothing goes before it is drained"
    says(kube, 8, None, drained=f"{address('run-inference-1')} 10.9.9.9 nonsense")
    assert engines(kube) == 3
    assert sorted(pod["metadata"]["name"] for pod in kube.pods("inference")) == [
        "run-inference-0",
        "run-inference-2",
        "run-inference-3",
    ]
    assert not [p for p in kube.pods("inference") if DELETION_COST in (p["metadata"].get("annotations") or {})]


def test_orchestrator_receives_the_window_of_its_measurements() -> None:
    kube = begun({"inference": {"autoscale": AUTOSCALE | {"stabilizationSeconds": 77}}})
    says(kube, 2, load(2))
    assert float(kube.objects[LEASE]["metadata"]["annotations"][keys.ENGINES_WINDOW]) == 77


def test_a_failed_engine_needs_no_drain() -> None:
    kube = begun({"inference": {"autoscale": {"min": 1, "max": 4}}})
    says(kube, 2, load(1, waited=0.6))
    assert engines(kube) == 2
    says(kube, 4, load(2, idle=0.6))
    assert engines(kube) == 2
    kube.exit("inference", 1, index=0)
    kube.make_ready = False
    kube.tick()
    assert engines(kube) == 1


@pytest.mark.parametrize("silence", ["none", "stale"])
def test_a_silent_run_keeps_its_engines(silence: str) -> None:
    kube = begun()
    says(kube, 2, load(2, waited=0.5))
    if silence == "none":
        says(kube, 3, None)
        kube.tick(3600)
        assert engines(kube) == 4
    else:
        kube.report(3, engines=load(4, idle=0.9), engines_drained="10.0.0.1 10.0.0.2 10.0.0.3")
        kube.now += run_progress.HEARTBEAT_SECONDS
        kube.settle()
        assert (engines(kube), kube.status["inference"]["desired"]) == (4, 4)


def test_an_attempt_that_ends_changes_nothing_and_the_next_one_has_as_many() -> None:
    kube = begun()
    says(kube, 2, load(2, waited=0.5))
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], engines(kube), len(kube.pods("inference"))) == (2, 4, 4)
    assert kube.status["inference"]["desired"] == 4


def test_an_edit_of_the_bounds_is_followed_with_a_drain() -> None:
    kube = begun()
    says(kube, 2, load(2, waited=0.5))
    kube.edit(inference={"autoscale": {"min": 5, "max": 6}})
    kube.tick()
    assert engines(kube) == 5
    kube.edit(inference={"autoscale": {"min": 1, "max": 3}})
    with_addresses(kube)
    says(kube, 3, load(5))
    assert (engines(kube), kube.status["inference"]["desired"], asked(kube)) == (5, 3, "3")
    says(kube, 4, load(5), drained=f"{address('run-inference-3')} {address('run-inference-4')}")
    assert engines(kube) == 3


def test_fewer_replicas_by_hand_are_drained_too_and_at_once_where_nobody_can() -> None:
    kube = begun({"inference": {"replicas": 3}})
    assert asked(kube) is None
    kube.edit(inference={"replicas": 2})
    says(kube, 2, None)
    assert (engines(kube), asked(kube)) == (3, "2")
    says(kube, 3, None, drained=address("run-inference-0"))
    assert engines(kube) == 2
    assert "run-inference-0" not in [pod["metadata"]["name"] for pod in kube.pods("inference")]
    kube.edit(inference={"replicas": 1})
    kube.report(4, engines_drained="")
    kube.now += run_progress.HEARTBEAT_SECONDS
    kube.settle()
    assert engines(kube) == 1, "a person's edit does not wait for a silent orchestrator"


def test_an_orchestrator_of_an_earlier_release_is_not_waited_for() -> None:
    kube = begun({"inference": {"replicas": 3}})
    kube.edit(inference={"replicas": 2})
    kube.report(2)
    kube.tick()
    assert (engines(kube), asked(kube)) == (2, None)


def test_the_budget_of_drains_counts_the_fewest_engines() -> None:
    kube = begun({"inference": {"autoscale": {"min": 3, "max": 6}, "minAvailable": 2}})
    budget = kube.objects[Ref("PodDisruptionBudget", "run-inference")]
    assert budget["spec"]["maxUnavailable"] == 1
    assert kube.status["inference"]["selector"] == "rlrun.io/run=run,rlrun.io/role=inference"
