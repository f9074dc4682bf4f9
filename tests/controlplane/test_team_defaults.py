"""Defaults of a namespace on a real API server: in the pods and the status, never in the stored specification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import OperatorProcess, wait_for
from tests.controlplane.installation import judged_operator
from tests.controlplane.world import APPS, World, run

TEAM = "spec: {trainer: {image: team/trainer:1, nodeSelector: {defaults: 'yes'}}}\nlocked: [trainer.image]\n"


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Where the pods run."""
    names = cluster.add_fake_nodes(1, labels={"defaults": "yes"}, prefix="defaults")
    yield names
    cluster.kubectl("delete", "node", *names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ConfigMap as it is mounted into the operator's pod."""
    found = tmp_path_factory.mktemp("defaults")
    (found / "defaults.yaml").write_text(TEAM)
    return found


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, nodes: tuple[str, ...], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """An operator with defaults."""
    own = {"RLRUN_DEFAULTS_FOLDER": str(folder), "RLRUN_DEFAULTS_NAME": "team", "POD_NAMESPACE": "default"}
    with judged_operator(cluster, tmp_path_factory.mktemp("operator"), **own) as operator:
        yield operator


def test_defaults_are_taken_locked_and_edited(world: World, folder: Path) -> None:
    world.start("a")
    found = world.run("a")
    assert found["spec"] == run("a")["spec"], "what is stored is what was written"
    defaults = found["status"]["defaults"]
    assert (defaults["configMap"], defaults["fields"]) == ("default/team", ["trainer.image", "trainer.nodeSelector"])
    workload = world.kube("GET", world.path(APPS, "statefulsets", "a-trainer"))["spec"]["template"]["spec"]
    assert (workload["containers"][0]["image"], workload["nodeSelector"]) == ("team/trainer:1", {"defaults": "yes"})

    world.create("b", trainer={"image": "mine:2"})
    world.wait_told("b", r"trainer\.image \(mine:2\) is locked by ConfigMap default/team")
    world.wait_event("b", "ForbiddenByPolicy")

    before = world.settled("a")
    (folder / "defaults.yaml").write_text("spec: {trainer: {image: team/trainer:2}}")
    wait_for(
        lambda: world.condition("a", "ConfigurationValid"),
        lambda c: c.get("reason") == "ChangePending" and "defaults of the namespace" in c["message"],
        "the edit of the defaults is told",
        timeout=60,
    )
    world.wait_pods_ready("b", 2, timeout=60)
    (folder / "defaults.yaml").write_text("spec: {trainer: {image: 5}}")
    wait_for(
        lambda: world.condition("a", "ConfigurationValid"),
        lambda c: (
            c.get("reason") == "ForbiddenByPolicy" and "ConfigMap default/team, key defaults.yaml" in c["message"]
        ),
        "wrong defaults are told",
        timeout=60,
    )
    assert world.versions("a", leave_out=("leases",)) == before, "nothing of the attempt is touched"
    assert world.status("a")["phase"] == "Running"
