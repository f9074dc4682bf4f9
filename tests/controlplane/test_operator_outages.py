"""Outages that must not disturb a run: a killed, upgraded, frozen or duplicate operator, API server outages, and late
rights."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import STOP_SECONDS, OperatorProcess, wait_for
from tests.controlplane.installation import wait_served
from tests.controlplane.world import APPS, CORE, LEASES, World

AWAY_SECONDS = 16.0
"""Seconds that exceed the duration of the leader Lease."""
CHART = Path(__file__).parents[2] / "charts" / "rlrun-operator"


pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def world(cluster: Cluster, namespace: str) -> World:
    """Namespace of the test."""
    return World(cluster, namespace)


def operator_of(world: World, folder: Path, name: str = "operator-0", **environment: str) -> OperatorProcess:
    """Return an operator that serves only the test's namespace."""
    own = {"RLRUN_WATCH_NAMESPACES": world.namespace, "POD_NAMESPACE": world.namespace}
    return OperatorProcess(world.cluster, folder, name, **own, **environment)


class Started:
    """Context of an operator that starts without waiting for readiness and is killed at the end."""

    def __init__(self, operator: OperatorProcess) -> None:
        self._operator = operator

    def __enter__(self) -> OperatorProcess:
        return self._operator.start(ready=False)

    def __exit__(self, *_: object) -> None:
        if self._operator.running:
            self._operator.kill()


def wait_stand_by(operator: OperatorProcess) -> None:
    """Wait until the operator is ready to take over leadership."""
    wait_for(lambda: operator.http("/readyz")[0], lambda code: code == 200, "the stand-by is ready")


def rendered(world: World, name: str) -> dict[str, int]:
    """Return generations of the children: they change with the desired state, not with the status that other
    controllers write."""
    return {child: version[1] for child, version in world.versions(name, leave_out=("leases", "pods")).items()}


def uids(world: World, name: str) -> set[str]:
    """Return the UIDs of the run's pods."""
    return {pod["metadata"]["uid"] for pod in world.pods(name)}


def wait_seen(world: World, name: str, step: int, **renewal: object) -> None:
    """Renew the progress Lease with this step until the status contains it, which shows that the operator works.

    A watch that a starting server opened may deliver nothing: the operator opens it again after 70 s
    (`INACTIVITY_SECONDS`).
    """

    def look() -> dict[str, object]:
        world.renew(name, step, **renewal)  # type: ignore[arg-type]
        return world.status(name)

    wait_for(
        look,
        lambda s: str(s.get("steps")).startswith(f"{step}/"),
        f"step {step} is seen",
        pause=1.0,
    )


def test_restarted_operator_changes_no_child(world: World, tmp_path: Path) -> None:
    with operator_of(world, tmp_path) as operator:
        world.start("a")
        before = world.settled("a")
        operator.kill()
        world.renew("a", 5)
        operator.start()
        wait_seen(world, "a", 9)
        assert world.versions("a", leave_out=("leases",)) == before
        assert world.status("a")["attempt"] == 1
        written = {key: count for key, count in operator.writes().items() if key[1] != "rlruns/status"}
        assert written == {}, "a restarted operator has nothing to write but the status"
        operator.check_log()


@pytest.mark.full
def test_operator_upgrade_takes_effect_with_next_attempt(world: World, tmp_path: Path) -> None:
    with operator_of(world, tmp_path, RLRUN_TRAINER_IMAGE="reg/trainer:1") as operator:
        world.start("a")
        before = world.settled("a")
        operator.stop()
    with operator_of(
        world,
        tmp_path,
        "operator-1",
        RLRUN_TRAINER_IMAGE="reg/trainer:2",
        RLRUN_INFERENCE_IMAGE="reg/inference:2",
        RLRUN_CLUSTER_DOMAIN="other.local",
    ):
        wait_seen(world, "a", 9)
        assert world.versions("a", leave_out=("leases",)) == before
        world.delete("pods", "a-trainer-0")
        world.wait_phase("a", "Starting", attempt=2)
        pod = wait_for(
            lambda: world.kube.get(world.path(CORE, "pods", "a-trainer-0")) or {},
            lambda found: found.get("metadata", {}).get("labels", {}).get("rlrun.io/attempt") == "2",
            "the trainer's pod of attempt 2",
        )
        assert pod["spec"]["containers"][0]["image"] == "reg/trainer:2"
        wait_for(
            lambda: {
                p["spec"]["containers"][0]["image"] for p in world.pods("a") if "-inference-" in p["metadata"]["name"]
            },
            lambda images: images == {"reg/inference:2"},
            "the engines of attempt 2 are of the same release",
        )
        world.wait_pods_ready("a", 2)
        engines = world.kube("GET", world.path(APPS, "deployments", "a-inference"))["metadata"]["generation"]
        world.renew("a", 12, attempt=2)
        world.delete("pods", "a-trainer-0")
        world.wait_phase("a", "Starting", attempt=3)
        world.wait_pods_ready("a", 2)
        after = world.kube("GET", world.path(APPS, "deployments", "a-inference"))["metadata"]["generation"]
        assert after == engines, "engines that are rendered no otherwise stay"


@pytest.mark.full
def test_operator_handles_events_missed_while_dead(world: World, tmp_path: Path) -> None:
    with operator_of(world, tmp_path) as operator:
        world.start("restarts")
        world.start("goes")
        operator.kill()
        world.end_container("restarts-trainer-0", 1, "out of memory")
        world.delete("rlruns", "goes", api="/apis/rlrun.io/v1alpha1")
        operator.start()
        status = world.wait_phase("restarts", "Starting", attempt=2)
        assert status["lastFailure"]["message"] == "out of memory"
        assert status["restartsCountedTowardsMax"] == 1
        wait_for(lambda: world.versions("goes"), lambda left: len(left) <= 1, "the other run is gone")
        assert not [sample for sample in operator.metrics() if 'run="goes"' in sample]


@pytest.mark.parametrize("how", [pytest.param("refuses", marks=pytest.mark.full), "hangs"])
def test_api_server_outage_disturbs_no_run(world: World, tmp_path: Path, how: str) -> None:
    # During the outage nodes cannot renew their Leases, so the pods need a toleration for nodes that are marked as
    # dead.
    stays = {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}
    with operator_of(world, tmp_path) as operator:
        world.start("a", trainer=stays, inference=stays, orchestrator={"batchSize": 16, **stays})
        before, pods = rendered(world, "a"), uids(world, "a")
        server = world.cluster.api_server
        began = time.monotonic()
        (server.stop if how == "refuses" else server.freeze)()
        try:
            wait_for(lambda: operator.metric("rlrun_operator_leader"), lambda leads: leads == 0.0, "it stops acting")
            while time.monotonic() - began < AWAY_SECONDS:  # the duration of the outage, not a wait for a condition
                assert operator.http("/livez")[0] == 200, "a restart would not bring the API server back"
                time.sleep(0.5)
        finally:
            (server.start if how == "refuses" else server.thaw)()
        operator.wait_ready()
        wait_seen(world, "a", 9)
        status = world.status("a")
        assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
        assert "HeartbeatLost" not in world.events("a"), "that no renewal was seen was not the run's doing"
        assert (rendered(world, "a"), uids(world, "a")) == (before, pods)
        world.delete("pods", "a-trainer-0")
        # The StatefulSet's controller has to return and delete its pods.
        world.wait_phase("a", "Starting", attempt=2)
        operator.check_log()
    world.cluster.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=60s", timeout=70)


@pytest.mark.full
def test_standby_operator_takes_over_from_frozen_leader(world: World, tmp_path: Path) -> None:
    with operator_of(world, tmp_path) as first, Started(operator_of(world, tmp_path, "operator-1")) as second:
        wait_stand_by(second)
        world.start("a")
        assert second.metric("rlrun_operator_leader") == 0.0
        assert second.writes() == {}
        before = world.settled("a")
        first.freeze()
        second.wait_ready()
        wait_seen(world, "a", 9)
        first.thaw()
        assert first.wait_exit() == 1, "it must not act on what it knew"
        assert "operator-1 leads now" in first.log()
        assert world.versions("a", leave_out=("leases",)) == before


@pytest.mark.full
def test_stopped_operator_releases_leadership_at_once(world: World, tmp_path: Path) -> None:
    with operator_of(world, tmp_path) as first, Started(operator_of(world, tmp_path, "operator-1")) as second:
        wait_stand_by(second)
        code, seconds = first.stop()
        assert (code, seconds < STOP_SECONDS) == (0, True), (code, seconds)
        lease = world.kube("GET", world.path(LEASES, "leases", "rlrun-operator"))
        assert lease["spec"]["holderIdentity"] in ("", "operator-1"), "nobody waits the 15 s until it has expired"
        second.wait_ready()


@pytest.mark.full
def test_second_release_for_namespace_stays_idle_and_reports(world: World, tmp_path: Path) -> None:
    """Different releases have different leader Leases, so the second one does not wait as a standby replica."""
    with operator_of(world, tmp_path) as first:
        world.start("a")
        before = world.settled("a")
        with operator_of(world, tmp_path, "operator-1", RLRUN_LEASE_NAME="other") as second:
            served = f'rlrun_operator_serves{{managed_by="",namespace="{world.namespace}"}}'
            wait_for(lambda: second.metrics().get(served), lambda value: value == 0.0, "the second one tells")
            assert first.metrics()[served] == 1.0
            words = f"namespace {world.namespace}: the operator {world.namespace}/rlrun-operator looks"
            wait_for(second.log, lambda text: words in text, "its log tells")
            wait_for(lambda: second.http("/readyz")[1], lambda text: "serves its runs" in text, "its probe tells")
            world.wait_event("a", "ServedByAnotherOperator")
            world.create("b")
            world.wait_phase("b", "Starting")
            assert {key for key in second.writes() if key[1] != "events"} == {("create", "leases")}, "its leader Lease"
            assert world.versions("a", leave_out=("leases",)) == before
            first.stop()
            lease = world.path(LEASES, "leases", "rlrun-operator-serves")
            # Equivalent to 120 s without a renewal, which the second operator would have to observe.
            world.kube("PATCH", lease, {"spec": {"leaseDurationSeconds": 1, "holderIdentity": ""}})
            wait_for(lambda: second.metrics().get(served), lambda value: value == 1.0, "it follows")
            world.wait_pods_ready("b", 2)
            world.renew("b", 1)
            world.wait_phase("b", "Running")
            assert world.versions("a", leave_out=("leases",)) == before


def test_missing_rights_are_reported_and_chart_role_suffices(world: World, tmp_path: Path) -> None:
    cluster, ns = world.cluster, world.namespace
    cluster.kubectl("create", "serviceaccount", "weak", "-n", ns)
    kubeconfig = as_account(cluster, ns, "weak", tmp_path)
    with Started(operator_of(world, tmp_path, KUBECONFIG=str(kubeconfig))) as operator:
        missing = (
            f"get, list, watch rlruns.rlrun.io in namespace {ns}",
            "create, patch, delete pods",
            "watchNamespaces",
        )
        wait_for(operator.log, lambda text: all(words in text for words in missing), "the log names what is missing")
        assert operator.http("/livez")[0] == 200
        wait_for(
            lambda: operator.http("/readyz"),
            lambda said: said[0] == 503 and "rlruns.rlrun.io" in said[1],
            "the probe names what is missing",
        )
        values = f"watchNamespaces={{{ns}}},serveOwnNamespace=true,replicas=0"
        cluster.helm("install", "op", str(CHART), "-n", ns, "--set", values)
        rules = json.loads(
            cluster.kubectl("get", "role,clusterrole", "-n", ns, "-l", "app.kubernetes.io/instance=op", "-o", "json")
        )
        for role in rules["items"]:
            if role["kind"] == "Role":
                cluster.kubectl(
                    "create", "rolebinding", f"weak-{role['metadata']['name']}", "-n", ns,
                    f"--role={role['metadata']['name']}", f"--serviceaccount={ns}:weak",
                )  # fmt: skip
        operator.wait_ready()
        world.start("a")
        world.settled("a")
        world.delete("pods", "a-trainer-0")
        world.wait_phase("a", "Starting", attempt=2)
        world.end_pod("a-orchestrator-2", 0)
        world.wait_phase("a", "Complete")
        assert "lacks a right" not in operator.log()
        operator.check_log()


def as_account(cluster: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """Write a kubeconfig for this ServiceAccount."""
    admin = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    token = cluster.kubectl("create", "token", account, "-n", namespace, "--duration=1h").strip()
    admin["users"] = [{"name": user["name"], "user": {"token": token}} for user in admin["users"]]
    path = folder / f"{account}.kubeconfig"
    path.write_text(json.dumps(admin))
    return path


@pytest.mark.full
def test_operator_waits_for_missing_crd(world: World, tmp_path: Path) -> None:
    """The two commands of the installation run in the wrong order. This is the last test because it deletes all runs of
    the cluster."""
    cluster = world.cluster
    kept = json.loads(cluster.kubectl("get", "crd", "rlruns.rlrun.io", "-o", "json"))
    kept["metadata"] = {k: v for k, v in kept["metadata"].items() if k in ("name", "labels", "annotations")}
    del kept["status"]
    cluster.kubectl("delete", "crd", "rlruns.rlrun.io")
    with Started(operator_of(world, tmp_path)) as operator:
        try:
            words = "helm install rlrun-crds charts/rlrun-crds"
            wait_for(
                operator.log,
                lambda text: "cannot start yet" in text and words in text,
                "the log says what is missing",
            )
            wait_for(lambda: operator.http("/readyz")[1], lambda text: words in text, "the probe says what is missing")
            assert operator.http("/livez")[0] == 200
        finally:
            cluster.kubectl("create", "-f", "-", stdin=json.dumps(kept))
            wait_served(cluster)
        operator.wait_ready()
        world.start("a")
        operator.check_log()
