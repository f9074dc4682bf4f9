"""Defaults of a namespace on a real API server: used for pods and status, and not stored in the specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.controlplane.harness import wait_for
from tests.controlplane.world import APPS, World, run

pytestmark = pytest.mark.full

TEAM = "spec: {trainer: {image: team/trainer:1, nodeSelector: {shared: 'yes'}}}\nlocked: [trainer.image]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the ConfigMap as mounted into the operator's pod."""
    found = tmp_path_factory.mktemp("defaults")
    (found / "defaults.yaml").write_text(TEAM)
    return found


@pytest.fixture(scope="module")
def operator_settings(folder: Path) -> Mapping[str, str]:
    """Settings with defaults for a namespace."""
    return {"RLRUN_DEFAULTS_FOLDER": str(folder), "RLRUN_DEFAULTS_NAME": "team", "POD_NAMESPACE": "default"}


def test_team_defaults_apply_and_lock_fields(world: World, folder: Path) -> None:
    world.start("a")
    found = world.run("a")
    assert found["spec"] == run("a")["spec"], "what is stored is what was written"
    defaults = found["status"]["defaults"]
    assert (defaults["configMap"], defaults["fields"]) == ("default/team", ["trainer.image", "trainer.nodeSelector"])
    workload = world.kube("GET", world.path(APPS, "statefulsets", "a-trainer"))["spec"]["template"]["spec"]
    assert (workload["containers"][0]["image"], workload["nodeSelector"]) == ("team/trainer:1", {"shared": "yes"})

    world.create("b", trainer={"image": "mine:2"})
    world.wait_told("b", r"trainer\.image \(mine:2\) is locked by ConfigMap default/team")
    world.wait_event("b", "ForbiddenByPolicy")

    before = world.settled("a")
    (folder / "defaults.yaml").write_text("spec: {trainer: {image: team/trainer:2}}")
    wait_for(
        lambda: world.condition("a", "ConfigurationValid"),
        lambda c: c.get("reason") == "ChangePending" and "defaults of the namespace" in c["message"],
        "the edit of the defaults is told",
    )
    world.wait_pods_ready("b", 2)
    (folder / "defaults.yaml").write_text("spec: {trainer: {image: 5}}")
    wait_for(
        lambda: world.condition("a", "ConfigurationValid"),
        lambda c: (
            c.get("reason") == "ForbiddenByPolicy" and "ConfigMap default/team, key defaults.yaml" in c["message"]
        ),
        "wrong defaults are told",
    )
    assert world.versions("a", leave_out=("leases",)) == before, "nothing of the attempt is touched"
    assert world.status("a")["phase"] == "Running"
