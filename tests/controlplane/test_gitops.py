"""Diffs, several managers and pruning: a stored object contains only the fields that its author wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import Cluster, ClusterError
from tests.controlplane.harness import wait_for
from tests.controlplane.world import APPS, CORE, RUNS, World

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
Json = dict[str, Any]


def manifest(name: str, **spec: Any) -> Json:
    small = {
        "model": {"tiny": {}},
        "seqLen": 512,
        "environments": [{"id": "reverse-text"}, {"id": "reverse-text", "name": "again", "ratio": 0.5}],
        "orchestrator": {"batchSize": 16},
    }
    return {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": name}, "spec": {**small, **spec}}


class Author:
    """A user who applies manifests to a namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self, document: Json, *options: str) -> str:
        """Run `kubectl apply`."""
        return self.cluster.kubectl("apply", "-n", self.namespace, *options, "-f", "-", stdin=json.dumps(document))

    def as_manager(self, manager: str, document: Json) -> str:
        """Server-side apply as one of several managers."""
        return self.apply(document, "--server-side", f"--field-manager={manager}")

    def diff(self, document: Json, *options: str) -> str:
        """Run `kubectl diff`, which exits with 1 if it finds a difference."""
        arguments = ("diff", "-n", self.namespace, *options, "-f", "-")
        return self.cluster.kubectl(*arguments, stdin=json.dumps(document))


@pytest.fixture
def author(cluster: Cluster, namespace: str) -> Author:
    return Author(cluster, namespace)


@pytest.mark.full
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_unchanged_manifest_gives_empty_diff(author: Author, path: Path) -> None:
    for document in filter(None, yaml.safe_load_all(path.read_text())):
        assert author.apply(document).strip().endswith("created")
        assert author.apply(document).strip().endswith("unchanged")
        assert author.diff(document) == ""


def test_operator_writes_cause_no_diff(world: World, author: Author) -> None:
    document = manifest("a")
    author.apply(document)
    world.wait_phase("a", "Starting")
    world.wait_pods_ready("a", 2)
    assert author.diff(document) == ""
    world.renew("a", 1)
    world.wait_phase("a", "Running")
    assert author.apply(document).strip().endswith("unchanged")
    author.apply(manifest("a", suspend=True))
    world.wait_phase("a", "Suspended")
    assert author.diff(manifest("a", suspend=True)) == ""
    assert world.run("a")["spec"] == manifest("a", suspend=True)["spec"]


@pytest.mark.full
def test_omitted_field_equals_its_default(world: World, author: Author) -> None:
    """An earlier release stored all defaults. Applying the short manifest to such an object changes nothing."""
    long = manifest("a", seed=0, trainer={"replicas": 1, "optimizer": {"lr": 1e-6}}, evaluation={"interval": 20})
    defaults = {"ratio": 1.0, "groupSize": 8, "solvedReward": 1.0, "timeoutSeconds": 600, "workers": 1, "algorithm": {}}
    long["spec"]["environments"][0] |= defaults
    author.apply(long)
    world.wait_phase("a", "Starting")
    world.wait_pods_ready("a", 2)
    before = world.settled("a", leave_out=("leases", "poddisruptionbudgets"))
    short = manifest("a", evaluation={})
    author.apply(short)
    assert world.run("a")["spec"] == short["spec"]
    world.renew("a", 1)
    world.wait_phase("a", "Running", attempt=1)
    assert world.versions("a", leave_out=("leases", "poddisruptionbudgets")) == before
    with pytest.raises(ClusterError, match=r'frozen .*"environments"'):
        author.apply(manifest("a", evaluation={}, environments=[{"id": "reverse-text", "groupSize": 4}]))
    with pytest.raises(ClusterError, match=r'frozen .*"evaluation"'):
        author.apply(manifest("a", evaluation={"interval": 21}))
    with pytest.raises(ClusterError, match=r'frozen .*"trainer.optimizer"'):
        author.apply(manifest("a", evaluation={}, trainer={"optimizer": {"lr": 2e-6}}))


@pytest.mark.full
def test_two_managers_share_a_run(author: Author, world: World) -> None:
    def part(**spec: Any) -> Json:
        return {**manifest("a"), "spec": spec}

    team, platform = (
        manifest("a", suspend=True, trainer={"env": [{"name": "A", "value": "1"}]}),
        {"trainer": {"env": [{"name": "HTTPS_PROXY", "value": "p"}], "nodeSelector": {"pool": "b"}, "guests": ["x-*"]}},
    )
    author.as_manager("team", team)
    for _ in range(2):
        author.as_manager("platform", part(**platform))
        author.as_manager("team", team)
    spec = world.run("a")["spec"]
    assert spec["trainer"]["env"] == [*team["spec"]["trainer"]["env"], *platform["trainer"]["env"]]
    assert spec["trainer"]["guests"] == ["x-*"]
    author.as_manager("other", part(trainer={"guests": ["y"]}))
    assert sorted(world.run("a")["spec"]["trainer"]["guests"]) == ["x-*", "y"]

    for wanted, field in (
        ({"trainer": {"env": [{"name": "A", "value": "2"}]}}, r'env\[name="A"\].value'),
        ({"seqLen": 1024}, ".spec.seqLen"),
        ({"environments": [{"id": "gsm8k"}]}, ".spec.environments"),
    ):
        with pytest.raises(ClusterError, match=rf'conflict with "team".*{field}'):
            author.as_manager("platform", part(**{**platform, **wanted}))
    author.as_manager("platform", part(trainer={}))
    assert world.run("a")["spec"] == {**team["spec"], "trainer": {**team["spec"]["trainer"], "guests": ["y"]}}


@pytest.mark.full
def test_stored_duplicate_list_item_does_not_block_run(cluster: Cluster, world: World) -> None:
    """Lists of earlier releases had no keys. The status and labels of a run with such a list can still be written."""
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlruns.rlrun.io"
    found = world.kube("GET", crd)["spec"]["versions"]
    spec = found[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    guests = spec["trainer"]["properties"]["guests"]
    kind = guests.pop("x-kubernetes-list-type")
    twice = manifest("a", suspend=True, trainer={"guests": ["b", "b"]})
    try:
        world.kube("PATCH", crd, {"spec": {"versions": found}})
        # The API server applies a new schema a moment later.
        wait_for(
            lambda: world.kube("POST", world.path(RUNS, "rlruns"), twice, ok=False),
            lambda answer: answer["kind"] == "RLRun",
            "a list without keys is taken",
        )
    finally:
        guests["x-kubernetes-list-type"] = kind
        world.kube("PATCH", crd, {"spec": {"versions": found}})
    cluster.kubectl("label", "rlr", "a", "-n", world.namespace, "team=a")
    told = world.wait_phase("a", "Suspended")["conditions"]
    assert any('"b" twice' in condition["message"] for condition in told)
    again = {**twice, "metadata": {"name": "b"}}
    create = world.path(RUNS, "rlruns") + "?dryRun=All"
    wait_for(
        lambda: world.kube("POST", create, again, ok=False).get("message", ""),
        lambda message: "spec.trainer.guests[1]: Duplicate value" in message,
        "a new run with such a list is refused",
    )


@pytest.mark.full
def test_gitops_tracking_labels_are_not_copied(world: World, author: Author, cluster: Cluster) -> None:
    marks = {"argocd.argoproj.io/tracking-id": "a:rlrun.io/RLRun:x/a"}
    labels = {
        "app.kubernetes.io/instance": "a",
        "kustomize.toolkit.fluxcd.io/name": "a",
        "argocd.argoproj.io/instance": "a",
    }
    document = manifest("a")
    document["metadata"] |= {"labels": labels, "annotations": marks}
    author.apply(document)
    world.wait_phase("a", "Starting")
    claim = world.kube("GET", world.path(CORE, "persistentvolumeclaims", "a-data"))["metadata"]
    assert "ownerReferences" not in claim
    assert not (labels.keys() | marks.keys()) & {*claim["labels"], *claim.get("annotations", {})}
    for child in world.kube.items(world.path(APPS, "statefulsets")):
        tracked = {*marks, *labels} - {"app.kubernetes.io/instance"}
        assert not tracked & {*child["metadata"]["labels"], *child["metadata"].get("annotations", {})}
        assert child["metadata"]["ownerReferences"], "what has an owner is pruned by nobody"
