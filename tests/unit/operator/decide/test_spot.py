"""Engines on interruptible nodes: a Deployment beside the run's, whose loss is an event, and never a failure."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.runtime import exit_codes
from rlrun_operator.names import SPOT_LABEL, Ref
from rlrun_operator.state import Admission
from tests.unit.operator.decide.kube import Kube

ON_SPOT = {"capacity": "spot"}
SPOT: dict[str, Any] = {"share": 0.5, "nodeSelector": ON_SPOT}
ENGINES: dict[str, Any] = {"replicas": 4, "spot": SPOT}
ORDINARY, EXTRA = Ref("Deployment", "run-inference"), Ref("Deployment", "run-inference-spot")
LEASE, BUDGET = Ref("Lease", "run-progress"), Ref("PodDisruptionBudget", "run-inference")


def begun(**more: Any) -> Kube:
    kube = Kube({"inference": ENGINES | more})
    kube.place = lambda pod: "spot-1" if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    with_addresses(kube)
    return kube


def with_addresses(kube: Kube) -> None:
    for number, pod in enumerate(kube.pods("inference")):
        pod["status"].setdefault("podIP", f"10.0.0.{number + 1}")


def numbers(kube: Kube) -> tuple[int, int]:
    """Engines of both Deployments; -1: there is none."""
    found = [kube.objects.get(ref) for ref in (ORDINARY, EXTRA)]
    one, other = (int(child["spec"]["replicas"]) if child is not None else -1 for child in found)
    return one, other


def on_spot(kube: Kube) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.pods("inference") if SPOT_LABEL in pod["metadata"]["labels"]]


def lose_nodes(kube: Kube) -> None:
    """The spot nodes are taken back, and no other one comes."""
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    lost = on_spot(kube)
    for index, pod in enumerate(kube.pods("inference")):
        if pod["metadata"]["name"] in lost:
            kube.disrupt("inference", index, "DeletionByTaintManager")
    kube.settle()


def spot_of(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.status["inference"]["spot"]
    return found


def test_a_share_of_the_engines_has_nodes_of_its_own() -> None:
    kube = begun(tolerations=[{"key": "a", "operator": "Exists"}], nodeSelector={"capacity": "plain", "zone": "z"})
    assert numbers(kube) == (2, 2)
    pods = kube.objects[EXTRA]["spec"]["template"]
    assert pods["spec"]["nodeSelector"] == {"capacity": "spot", "zone": "z"}
    assert kube.objects[ORDINARY]["spec"]["template"]["spec"]["nodeSelector"] == {"capacity": "plain", "zone": "z"}
    assert (kube.status["inferenceReady"], spot_of(kube)["ready"]) == ("4/4", 2)
    assert {"key": "capacity", "operator": "Exists"} in pods["spec"]["tolerations"]


def test_engines_that_the_run_needs_are_not_on_spot() -> None:
    assert numbers(begun(spot=SPOT | {"share": 1})) == (1, 3)
    assert numbers(begun(spot=SPOT | {"share": 1}, minAvailable=3)) == (3, 1)
    assert numbers(begun(spot=SPOT | {"share": 1}, minAvailable=0)) == (0, 4)
    assert numbers(begun(replicas=1)) == (1, 0)


def test_lost_nodes_are_an_event_and_nothing_else() -> None:
    kube = begun()
    before = kube.status
    lose_nodes(kube)
    after, spot = kube.status, spot_of(kube)
    assert (after["phase"], after["attempt"], after["restarts"]) == ("Running", 1, 0)
    assert (after.get("lastFailure"), kube.condition("Scheduled")["status"]) == (None, "True")
    assert kube.condition("InferenceAvailable")["status"] == "True"
    assert kube.condition("InferenceAvailable")["message"] == (
        "at least 1 of 4 engines are ready; 2 of 2 spot engines find no node with capacity=spot: the run continues more slowly"
    )
    assert (spot["desired"], spot["ready"], spot["lost"]) == (2, 0, 2)
    assert spot["lastLoss"].startswith("pod run-inference-spot-")
    assert spot["lastLoss"].endswith("on node spot-1: DeletionByTaintManager: bye")
    assert kube.told.count(("Normal", "SpotEnginesLost")) >= 1
    assert [told for told in kube.told if told[0] == "Warning"] == []
    assert before["configHash"] == after["configHash"]
    kube.tick(3600)
    assert (kube.status["phase"], kube.status["restarts"], spot_of(kube)["lost"]) == ("Running", 0, 2)
    assert numbers(kube) == (2, 2), "they are not replaced by ordinary ones"


def test_one_missing_spot_engine_is_reported() -> None:
    kube = begun()
    lose_nodes(kube)
    found = on_spot(kube)[0]
    kube.place = lambda pod: None if pod["metadata"]["name"] in set(on_spot(kube)) - {found} else "spot-1"
    kube.tick()
    assert kube.condition("InferenceAvailable")["message"].endswith(
        "; 1 of 2 spot engines find no node with capacity=spot: the run continues more slowly"
    )


def test_nodes_that_return_bring_the_engines_back() -> None:
    kube = begun()
    lose_nodes(kube)
    kube.place = lambda pod: "spot-2"
    kube.tick()
    assert (spot_of(kube)["ready"], spot_of(kube)["lost"], kube.status["inferenceReady"]) == (2, 2, "4/4")
    assert ("Normal", "SpotEnginesReady") in kube.told
    assert kube.condition("InferenceAvailable")["message"] == "at least 1 of 4 engines are ready"


def test_a_node_that_fails_unseen_is_a_loss_as_well() -> None:
    kube = begun()
    del kube.objects[Ref("Pod", on_spot(kube)[0])]
    kube.tick()
    assert (spot_of(kube)["lost"], spot_of(kube)["lastLoss"]) == (
        1,
        "pod run-inference-spot-0 on node spot-1 was deleted",
    )


def test_the_cause_is_told_of_a_pod_that_has_vanished_since() -> None:
    kube = begun()
    name = on_spot(kube)[0]
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "node spot-1 is gone"}
    kube.objects[Ref("Pod", name)]["status"]["conditions"].append(gone)
    kube.look()
    del kube.objects[Ref("Pod", name)]
    kube.tick()
    assert spot_of(kube)["lastLoss"] == f"pod {name} on node spot-1: DeletionByPodGC: node spot-1 is gone"


def test_a_run_begins_without_them() -> None:
    kube = Kube({"inference": ENGINES})
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    assert (kube.status["phase"], numbers(kube)) == ("Running", (2, 2))
    assert (spot_of(kube)["ready"], spot_of(kube)["lost"]) == (0, 0)


def test_a_change_of_the_share_moves_engines_within_the_attempt() -> None:
    kube = begun()
    kube.report(4, engines_drained="")
    kube.edit(inference=ENGINES | {"spot": SPOT | {"share": 0.75}})
    kube.tick()
    assert numbers(kube) == (2, 3), "an ordinary one stays until it is drained"
    with_addresses(kube)
    kube.report(5, engines_drained="")
    kube.tick()
    asked = kube.objects[LEASE]["metadata"]["annotations"]
    assert asked[keys.ENGINES_WANTED] == "4"
    assert asked[keys.ENGINES_SPOT].split()[0] == "3"
    assert len(asked[keys.ENGINES_SPOT].split()) == 4
    drained = kube.pods("inference")[0]["status"]["podIP"]
    kube.report(6, engines_drained=drained)
    kube.tick()
    assert numbers(kube) == (1, 3)
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["reason"]) == (1, "Valid")
    assert spot_of(kube)["lost"] == 0


def test_spot_engines_that_an_edit_takes_away_are_not_lost() -> None:
    kube = begun()
    kube.edit(inference=ENGINES | {"spot": SPOT | {"share": 0.25}})
    kube.tick()
    kube.tick()
    assert (numbers(kube), spot_of(kube)["desired"], spot_of(kube)["lost"]) == ((3, 1), 1, 0)


def test_spot_engines_do_not_stand_for_others_without_a_node() -> None:
    kube = Kube({"inference": ENGINES})
    plain = "run-inference-"
    kube.place = lambda pod: None if pod["metadata"]["name"] in (f"{plain}0", f"{plain}1") else "node-1"
    kube.settle()
    kube.tick()
    assert kube.condition("Scheduled")["status"] == "False"
    assert spot_of(kube)["ready"] == 2


def test_it_can_be_added_and_removed_while_the_run_trains() -> None:
    kube = Kube({"inference": {"replicas": 4}}).start()
    place = kube.place
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.report(4)  # nobody drains
    kube.edit(inference=ENGINES)
    kube.tick()
    assert numbers(kube) == (4, 2), "no engine goes for one that has no node"
    kube.place = place
    kube.report(5)
    kube.tick()
    assert numbers(kube) == (2, 2)
    kube.edit(inference={"replicas": 4})
    kube.tick()
    assert numbers(kube) == (4, -1)
    assert "spot" not in kube.status["inference"]
    assert kube.status["attempt"] == 1
    assert len(kube.pods("inference")) == 4


def test_spot_engines_stay_until_they_are_drained_after_spot_was_removed() -> None:
    kube = begun()
    kube.report(5, engines_drained="")
    kube.edit(inference={"replicas": 4})
    kube.tick()
    assert numbers(kube) == (4, 2), "the orchestrator still uses them"
    with_addresses(kube)
    kube.report(6, engines_drained=",".join(pod["status"]["podIP"] for pod in kube.pods("inference")[-2:]))
    kube.tick()
    assert EXTRA in kube.objects


def test_other_nodes_renew_the_spot_engines_alone() -> None:
    kube = begun()
    before = {pod["metadata"]["uid"] for pod in kube.pods("inference")[:2]}
    kube.edit(inference=ENGINES | {"spot": SPOT | {"nodeSelector": {"capacity": "cheap"}}})
    kube.lingering = {"inference"}
    kube.tick()
    kube.lingering = set()
    kube.tick()
    kube.tick()
    assert {pod["metadata"]["uid"] for pod in kube.pods("inference")[:2]} == before
    assert kube.objects[EXTRA]["spec"]["template"]["spec"]["nodeSelector"] == {"capacity": "cheap"}
    assert (kube.status["attempt"], spot_of(kube)["ready"], spot_of(kube)["lost"]) == (1, 2, 0)
    assert numbers(kube) == (2, 2)


def test_other_nodes_wait_for_the_next_attempt_if_more_than_spot_was_edited() -> None:
    kube = begun()
    before = kube.objects[EXTRA]["spec"]["template"]
    other = ENGINES | {"spot": SPOT | {"nodeSelector": {"capacity": "cheap"}}}
    kube.edit(model={"path": "/models/b"}, inference=other)
    kube.tick()
    kube.tick()
    assert (kube.objects[EXTRA]["spec"]["template"], kube.status["attempt"]) == (before, 1)
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick(5)
    assert kube.objects[EXTRA]["spec"]["template"]["spec"]["nodeSelector"] == {"capacity": "cheap"}
    assert kube.status["attempt"] == 2


def test_a_deleted_deployment_is_made_again() -> None:
    kube = begun()
    kube.delete(EXTRA)
    kube.tick()
    kube.tick()
    assert (numbers(kube), spot_of(kube)["ready"], kube.status["attempt"]) == ((2, 2), 2, 1)


def test_an_attempt_that_ends_keeps_them_and_a_suspension_removes_them() -> None:
    kube = begun()
    uid = kube.uid(EXTRA)
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], kube.uid(EXTRA), spot_of(kube)["lost"]) == (2, uid, 0)
    kube.edit(suspend=True)
    for _ in range(10):
        kube.tick()
    assert (kube.status["phase"], numbers(kube), kube.pods("inference")) == ("Suspended", (-1, -1), [])
    assert spot_of(kube)["desired"] == 0
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["attempt"], numbers(kube)) == (3, (2, 2))
    assert ("Normal", "SpotEnginesLost") not in kube.told


def test_a_run_that_is_complete_leaves_none() -> None:
    kube = begun()
    kube.report(1000)
    kube.exit("orchestrator", 0)
    for _ in range(5):
        kube.tick()
    assert (kube.status["phase"], numbers(kube)) == ("Complete", (-1, -1))


def test_the_budget_of_drains_does_not_count_them() -> None:
    """Their loss would else keep the nodes of the others from being drained."""
    spec = begun().objects[BUDGET]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"]["matchExpressions"] == [{"key": SPOT_LABEL, "operator": "DoesNotExist"}]
    assert BUDGET not in begun(spot=SPOT | {"share": 1}).objects, "one ordinary engine may always be drained"


def test_any_edit_of_a_run_with_one_engine_makes_no_budget() -> None:
    kube = Kube({"inference": {"replicas": 1}}).start()
    kube.edit(progress={"deadlineSeconds": 900})
    kube.tick()
    assert BUDGET not in kube.objects


def test_the_queue_needs_no_room_for_them() -> None:
    """The answer of the queue itself is tested where it is made; here: what a run does that was admitted."""
    kube = Kube({"inference": ENGINES})
    kube.admission = Admission(True, "RoomFound", "room")
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    assert kube.status["phase"] == "Running"


@pytest.mark.parametrize(("minimum", "goes_on"), [(1, True), (0, False)])
def test_a_process_of_a_spot_engine_ends_no_attempt_that_has_other_engines(minimum: int, goes_on: bool) -> None:
    kube = begun(spot=SPOT | {"share": 1}, minAvailable=minimum)
    names = [pod["metadata"]["name"] for pod in kube.pods("inference")]
    kube.exit("inference", exit_codes.DATA, index=names.index(on_spot(kube)[0]))
    kube.settle()
    assert ("lastFailure" not in kube.status) == goes_on
