"""Engines on interruptible nodes: a second Deployment whose loss is an event and never a failure."""

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


def start_spot_run(**more: Any) -> Kube:
    kube = Kube({"inference": ENGINES | more})
    kube.place = lambda pod: "spot-1" if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    set_addresses(kube)
    return kube


def set_addresses(kube: Kube) -> None:
    for number, pod in enumerate(kube.pods("inference")):
        pod["status"].setdefault("podIP", f"10.0.0.{number + 1}")


def count_replicas(kube: Kube) -> tuple[int, int]:
    """Replicas of both Deployments; -1 for a missing Deployment."""
    found = [kube.objects.get(ref) for ref in (ORDINARY, EXTRA)]
    one, other = (int(child["spec"]["replicas"]) if child is not None else -1 for child in found)
    return one, other


def list_spot_pods(kube: Kube) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.pods("inference") if SPOT_LABEL in pod["metadata"]["labels"]]


def lose_nodes(kube: Kube) -> None:
    """Remove all spot nodes without replacement."""
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    lost = list_spot_pods(kube)
    for index, pod in enumerate(kube.pods("inference")):
        if pod["metadata"]["name"] in lost:
            kube.disrupt("inference", index, "DeletionByTaintManager")
    kube.settle()


def read_spot_status(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.status["inference"]["spot"]
    return found


def test_spot_share_of_engines_uses_spot_nodes() -> None:
    kube = start_spot_run(
        tolerations=[{"key": "a", "operator": "Exists"}], nodeSelector={"capacity": "plain", "zone": "z"}
    )
    assert count_replicas(kube) == (2, 2)
    pods = kube.objects[EXTRA]["spec"]["template"]
    assert pods["spec"]["nodeSelector"] == {"capacity": "spot", "zone": "z"}
    assert kube.objects[ORDINARY]["spec"]["template"]["spec"]["nodeSelector"] == {"capacity": "plain", "zone": "z"}
    assert (kube.status["inferenceReady"], read_spot_status(kube)["ready"]) == ("4/4", 2)
    assert {"key": "capacity", "operator": "Exists"} in pods["spec"]["tolerations"]


def test_required_engines_are_not_on_spot_nodes() -> None:
    assert count_replicas(start_spot_run(spot=SPOT | {"share": 1})) == (1, 3)
    assert count_replicas(start_spot_run(spot=SPOT | {"share": 1}, minAvailable=3)) == (3, 1)
    assert count_replicas(start_spot_run(spot=SPOT | {"share": 1}, minAvailable=0)) == (0, 4)
    assert count_replicas(start_spot_run(replicas=1)) == (1, 0)


def test_lost_spot_nodes_cause_only_an_event() -> None:
    kube = start_spot_run()
    before = kube.status
    lose_nodes(kube)
    after, spot = kube.status, read_spot_status(kube)
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
    assert (kube.status["phase"], kube.status["restarts"], read_spot_status(kube)["lost"]) == ("Running", 0, 2)
    assert count_replicas(kube) == (2, 2), "they are not replaced by ordinary ones"


def test_missing_spot_engine_is_reported() -> None:
    kube = start_spot_run()
    lose_nodes(kube)
    found = list_spot_pods(kube)[0]
    kube.place = lambda pod: None if pod["metadata"]["name"] in set(list_spot_pods(kube)) - {found} else "spot-1"
    kube.tick()
    assert kube.condition("InferenceAvailable")["message"].endswith(
        "; 1 of 2 spot engines find no node with capacity=spot: the run continues more slowly"
    )


def test_spot_engines_return_with_their_nodes() -> None:
    kube = start_spot_run()
    lose_nodes(kube)
    kube.place = lambda pod: "spot-2"
    kube.tick()
    assert (read_spot_status(kube)["ready"], read_spot_status(kube)["lost"], kube.status["inferenceReady"]) == (
        2,
        2,
        "4/4",
    )
    assert ("Normal", "SpotEnginesReady") in kube.told
    assert kube.condition("InferenceAvailable")["message"] == "at least 1 of 4 engines are ready"


def test_deleted_spot_pod_counts_as_a_loss() -> None:
    kube = start_spot_run()
    del kube.objects[Ref("Pod", list_spot_pods(kube)[0])]
    kube.tick()
    assert (read_spot_status(kube)["lost"], read_spot_status(kube)["lastLoss"]) == (
        1,
        "pod run-inference-spot-0 on node spot-1 was deleted",
    )


def test_cause_of_vanished_spot_pod_is_reported() -> None:
    kube = start_spot_run()
    name = list_spot_pods(kube)[0]
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "node spot-1 is gone"}
    kube.objects[Ref("Pod", name)]["status"]["conditions"].append(gone)
    kube.look()
    del kube.objects[Ref("Pod", name)]
    kube.tick()
    assert read_spot_status(kube)["lastLoss"] == f"pod {name} on node spot-1: DeletionByPodGC: node spot-1 is gone"


def test_run_starts_without_spot_engines() -> None:
    kube = Kube({"inference": ENGINES})
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    assert (kube.status["phase"], count_replicas(kube)) == ("Running", (2, 2))
    assert (read_spot_status(kube)["ready"], read_spot_status(kube)["lost"]) == (0, 0)


def test_changed_spot_share_moves_engines_within_the_attempt() -> None:
    kube = start_spot_run()
    kube.report(4, engines_drained="")
    kube.edit(inference=ENGINES | {"spot": SPOT | {"share": 0.75}})
    kube.tick()
    assert count_replicas(kube) == (2, 3), "an ordinary one stays until it is drained"
    set_addresses(kube)
    kube.report(5, engines_drained="")
    kube.tick()
    asked = kube.objects[LEASE]["metadata"]["annotations"]
    assert asked[keys.ENGINES_WANTED] == "4"
    assert asked[keys.ENGINES_SPOT].split()[0] == "3"
    assert len(asked[keys.ENGINES_SPOT].split()) == 4
    drained = kube.pods("inference")[0]["status"]["podIP"]
    kube.report(6, engines_drained=drained)
    kube.tick()
    assert count_replicas(kube) == (1, 3)
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["reason"]) == (1, "Valid")
    assert read_spot_status(kube)["lost"] == 0


def test_spot_engines_removed_by_an_edit_are_not_lost() -> None:
    kube = start_spot_run()
    kube.edit(inference=ENGINES | {"spot": SPOT | {"share": 0.25}})
    kube.tick()
    kube.tick()
    assert (count_replicas(kube), read_spot_status(kube)["desired"], read_spot_status(kube)["lost"]) == ((3, 1), 1, 0)


def test_spot_engines_do_not_replace_unscheduled_engines() -> None:
    kube = Kube({"inference": ENGINES})
    plain = "run-inference-"
    kube.place = lambda pod: None if pod["metadata"]["name"] in (f"{plain}0", f"{plain}1") else "node-1"
    kube.settle()
    kube.tick()
    assert kube.condition("Scheduled")["status"] == "False"
    assert read_spot_status(kube)["ready"] == 2


def test_spot_can_be_added_and_removed_during_training() -> None:
    kube = Kube({"inference": {"replicas": 4}}).start()
    place = kube.place
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.report(4)  # no orchestrator drains the engines
    kube.edit(inference=ENGINES)
    kube.tick()
    assert count_replicas(kube) == (4, 2), "no engine goes for one that has no node"
    kube.place = place
    kube.report(5)
    kube.tick()
    assert count_replicas(kube) == (2, 2)
    kube.edit(inference={"replicas": 4})
    kube.tick()
    assert count_replicas(kube) == (4, -1)
    assert "spot" not in kube.status["inference"]
    assert kube.status["attempt"] == 1
    assert len(kube.pods("inference")) == 4


def test_removed_spot_engines_stay_until_drained() -> None:
    kube = start_spot_run()
    kube.report(5, engines_drained="")
    kube.edit(inference={"replicas": 4})
    kube.tick()
    assert count_replicas(kube) == (4, 2), "the orchestrator still uses them"
    set_addresses(kube)
    kube.report(6, engines_drained=",".join(pod["status"]["podIP"] for pod in kube.pods("inference")[-2:]))
    kube.tick()
    assert EXTRA in kube.objects


def test_changed_spot_nodes_replace_only_spot_engines() -> None:
    kube = start_spot_run()
    before = {pod["metadata"]["uid"] for pod in kube.pods("inference")[:2]}
    kube.edit(inference=ENGINES | {"spot": SPOT | {"nodeSelector": {"capacity": "cheap"}}})
    kube.lingering = {"inference"}
    kube.tick()
    kube.lingering = set()
    kube.tick()
    kube.tick()
    assert {pod["metadata"]["uid"] for pod in kube.pods("inference")[:2]} == before
    assert kube.objects[EXTRA]["spec"]["template"]["spec"]["nodeSelector"] == {"capacity": "cheap"}
    assert (kube.status["attempt"], read_spot_status(kube)["ready"], read_spot_status(kube)["lost"]) == (1, 2, 0)
    assert count_replicas(kube) == (2, 2)


def test_other_edits_delay_changed_spot_nodes_to_next_attempt() -> None:
    kube = start_spot_run()
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


def test_deleted_spot_deployment_is_recreated() -> None:
    kube = start_spot_run()
    kube.delete(EXTRA)
    kube.tick()
    kube.tick()
    assert (count_replicas(kube), read_spot_status(kube)["ready"], kube.status["attempt"]) == ((2, 2), 2, 1)


def test_restart_keeps_spot_engines_and_suspension_removes_them() -> None:
    kube = start_spot_run()
    uid = kube.uid(EXTRA)
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], kube.uid(EXTRA), read_spot_status(kube)["lost"]) == (2, uid, 0)
    kube.edit(suspend=True)
    for _ in range(10):
        kube.tick()
    assert (kube.status["phase"], count_replicas(kube), kube.pods("inference")) == ("Suspended", (-1, -1), [])
    assert read_spot_status(kube)["desired"] == 0
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["attempt"], count_replicas(kube)) == (3, (2, 2))
    assert ("Normal", "SpotEnginesLost") not in kube.told


def test_complete_run_has_no_spot_engines() -> None:
    kube = start_spot_run()
    kube.report(1000)
    kube.exit("orchestrator", 0)
    for _ in range(5):
        kube.tick()
    assert (kube.status["phase"], count_replicas(kube)) == ("Complete", (-1, -1))


def test_disruption_budget_does_not_count_spot_engines() -> None:
    """Otherwise lost spot engines would block drains of the other nodes."""
    spec = start_spot_run().objects[BUDGET]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"]["matchExpressions"] == [{"key": SPOT_LABEL, "operator": "DoesNotExist"}]
    assert BUDGET not in start_spot_run(spot=SPOT | {"share": 1}).objects, "one ordinary engine may always be drained"


def test_edit_of_run_with_one_engine_makes_no_budget() -> None:
    kube = Kube({"inference": {"replicas": 1}}).start()
    kube.edit(progress={"deadlineSeconds": 900})
    kube.tick()
    assert BUDGET not in kube.objects


def test_admitted_run_starts_without_spot_engines() -> None:
    """Tests of the queue cover the admission itself."""
    kube = Kube({"inference": ENGINES})
    kube.admission = Admission(True, "RoomFound", "room")
    kube.place = lambda pod: None if SPOT_LABEL in pod["metadata"]["labels"] else "node-1"
    kube.start()
    assert kube.status["phase"] == "Running"


@pytest.mark.parametrize(("minimum", "goes_on"), [(1, True), (0, False)])
def test_failed_spot_engine_ends_no_attempt_with_other_engines(minimum: int, goes_on: bool) -> None:
    kube = start_spot_run(spot=SPOT | {"share": 1}, minAvailable=minimum)
    names = [pod["metadata"]["name"] for pod in kube.pods("inference")]
    kube.exit("inference", exit_codes.DATA, index=names.index(list_spot_pods(kube)[0]))
    kube.settle()
    assert ("lastFailure" not in kube.status) == goes_on
