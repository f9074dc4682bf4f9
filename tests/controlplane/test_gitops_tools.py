"""Health and diffs of runs in each phase, computed by the code of Argo CD, kstatus (Flux) and Kustomize."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import Cluster
from tests.cluster.binaries import find
from tests.cluster.progress import Progress
from tests.controlplane.harness import wait_for
from tests.controlplane.world import World, run

pytestmark = pytest.mark.full

Json = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "teams.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gitops"
HEALTH = "resource.customizations.health.rlrun.io_RLRun"


class Tools:
    """Programs built from `tests/cluster/kube/gitops`."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def __call__(self, command: str, folder: str = "", **given: Any) -> str:
        arguments = [str(self._binary), command, *([folder] if folder else [])]
        done = subprocess.run(arguments, input=json.dumps(given), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def health(self, live: Json) -> tuple[str, str]:
        """Return Argo CD's status, by the script of the documentation, and kstatus' status."""
        return self._argo(live)["status"], json.loads(self("kstatus", live=live))["Status"]

    def message(self, live: Json) -> str:
        """Return Argo CD's message."""
        return str(self._argo(live)["message"])

    def _argo(self, live: Json) -> Json:
        (script,) = [block[HEALTH] for block in blocks() if HEALTH in block]
        answer: Json = json.loads(self("argo-health", live=live, script=script, key="rlrun.io/RLRun"))
        return answer

    def differs(self, desired: Json, live: Json) -> bool:
        """Return whether Argo CD reports OutOfSync."""
        return bool(json.loads(self("argo-diff", desired=desired, live=live))["modified"])


@pytest.fixture(scope="module")
def tools() -> Tools:
    return Tools(find("gitops", progress=Progress())["gitops"])


def blocks() -> list[Json]:
    """Return the YAML blocks of the page."""
    return [
        yaml.safe_load(text.partition("```")[0])
        for text in PAGE.read_text().partition("\n## GitOps\n")[2].split("```yaml\n")[1:]
    ]


class Synced:
    """A run applied by a GitOps tool."""

    def __init__(self, cluster: Cluster, world: World, tools: Tools, desired: Json) -> None:
        self._cluster, self._world, self._tools, self.desired = cluster, world, tools, desired
        self.sync()

    @property
    def name(self) -> str:
        return str(self.desired["metadata"]["name"])

    def sync(self, **spec: Any) -> str:
        """Apply the run with changed values from Git."""
        self.desired = {**self.desired, "spec": {**self.desired["spec"], **spec}}
        return self._cluster.kubectl("apply", "-n", self._world.namespace, "-f", "-", stdin=json.dumps(self.desired))

    def health(self, phase: str) -> tuple[str, str]:
        """Return the health in Argo CD and Flux in this phase; check that there is no diff and that a second sync
        changes nothing."""
        self._world.wait_phase(self.name, phase)
        live = self._world.run(self.name)
        here = {**self.desired, "metadata": {**self.desired["metadata"], "namespace": self._world.namespace}}
        assert not self._tools.differs(here, live)
        changed = {**here, "spec": {**here["spec"], "maxSteps": 99}}
        assert self._tools.differs(changed, live), "the tool sees an edit"
        assert self.sync().strip().endswith("unchanged")
        return self._tools.health(live)


@pytest.fixture
def synced(cluster: Cluster, world: World, tools: Tools) -> Synced:
    document = run("a")
    document["metadata"]["labels"] = {"app.kubernetes.io/instance": "a"}
    return Synced(cluster, world, tools, document)


def train(world: World, name: str, attempt: int = 1) -> None:
    world.wait_phase(name, "Starting", attempt=attempt)
    world.wait_pods_ready(name, 2)
    world.renew(name, attempt, attempt=attempt)
    world.wait_phase(name, "Running")


def test_suspended_and_resumed_run_reports_health_until_complete(world: World, synced: Synced, tools: Tools) -> None:
    assert tools.health({**synced.desired, "metadata": {"name": "a", "generation": 1}})[0] == "Progressing", (
        "no status yet"
    )
    assert synced.health("Starting") == ("Progressing", "InProgress")
    train(world, "a")
    assert synced.health("Running") == ("Progressing", "Current")
    synced.sync(suspend=True)
    assert synced.health("Suspended") == ("Suspended", "Current")
    live = world.run("a")
    live["metadata"]["generation"] += 1
    assert tools.health(live) == ("Progressing", "InProgress"), "an edit that the operator has not seen"
    synced.sync(suspend=False)
    train(world, "a", attempt=2)
    world.end_pod("a-orchestrator-2", 0)
    assert synced.health("Complete") == ("Healthy", "Current")


def test_unserved_run_is_in_progress(cluster: Cluster, world: World, tools: Tools) -> None:
    synced = Synced(cluster, world, tools, run("a", managedBy="nobody"))
    assert synced.health("Unserved") == ("Progressing", "InProgress")
    assert tools.message(world.run("a")).startswith("no operator has processed this run yet")


def test_failed_run_is_degraded(world: World, synced: Synced) -> None:
    train(world, "a")
    world.end_pod("a-orchestrator-1", 64, "no such data")
    assert synced.health("Failed") == ("Degraded", "Failed")


def test_restarting_run_is_in_progress(world: World, synced: Synced, tools: Tools) -> None:
    train(world, "a")
    world.end_pod("a-orchestrator-1", 1)
    restarting = wait_for(
        lambda: world.run("a"), lambda live: live["status"]["phase"] in ("Restarting", "Starting"), "it restarts"
    )
    assert tools.health(restarting) == ("Progressing", "InProgress")


def test_refused_specification_is_degraded(cluster: Cluster, world: World, tools: Tools) -> None:
    document = run("a", orchestrator={"podTemplate": {"spec": {"hostNetwork": True}}, "batchSize": 16})
    Synced(cluster, world, tools, document)
    live = wait_for(lambda: world.run("a"), lambda live: "conditions" in live["status"], "the operator judges it")
    assert tools.health(live) == ("Degraded", "Failed")


def test_kustomize_patches_a_run_and_an_item(cluster: Cluster, world: World, tools: Tools, tmp_path: Path) -> None:
    (kustomization,) = [block for block in blocks() if "patches" in block]
    document = run("quickstart", trainer={"optimizer": {"name": "adamw"}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (built,) = yaml.safe_load_all(tools("kustomize", str(tmp_path)))
    optimizer = built["spec"]["trainer"]["optimizer"]
    optimizer["lr"] = float(optimizer["lr"])  # YAML in Kubernetes reads 2e-05 as a number, PyYAML reads it as text
    assert optimizer == {"name": "adamw", "lr": 2e-5}
    assert built["spec"]["environments"] == [{"id": "reverse-text", "groupSize": 8, "ratio": 2}]
    synced = Synced(cluster, world, tools, built)
    assert synced.health("Starting") == ("Progressing", "InProgress")


@pytest.mark.parametrize("team", ["team-a", "team-b"])
def test_example_overlays_build_accepted_runs(cluster: Cluster, namespace: str, tools: Tools, team: str) -> None:
    (built,) = yaml.safe_load_all(tools("kustomize", str(EXAMPLE / "overlays" / team)))
    assert built["metadata"]["namespace"] == team
    del built["metadata"]["namespace"]
    cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(built))
