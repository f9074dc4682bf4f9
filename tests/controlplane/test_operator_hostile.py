"""Hostile objects of one team beside healthy runs of another one, on a real API server: the healthy ones do not notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError
from tests.controlplane.harness import Json, OperatorProcess, wait_for
from tests.controlplane.installation import BROKEN, ROOT, fresh_namespace, wait_served
from tests.controlplane.world import CORE, RUNS, World, run

POLICY = ROOT / "crds" / "rlrun.io_rlruns_policy.yaml"
FIELDS = ("args", "options", "podTemplate", "affinity", "extraEgress")
LEVELS = (33, 150, 300, 3000, 9000)
"""One more than is allowed; within every parser's limit; beyond that of the operator's, of Python's, and almost of the API server's."""


@pytest.fixture
def unjudged(cluster: Cluster) -> Iterator[None]:
    """Time in which the API server takes every specification, as one does on which nobody has installed the policy."""
    cluster.kubectl("delete", "-f", str(POLICY))
    try:
        wait_for(lambda: refused(cluster, "default", BROKEN), lambda message: message == "", "the policy is gone")
        yield
    finally:
        cluster.kubectl("apply", "-f", str(POLICY))
        wait_served(cluster)


@pytest.fixture
def other(cluster: Cluster) -> Iterator[World]:
    """The hostile team's namespace."""
    with fresh_namespace(cluster) as name:
        yield World(cluster, name)


def placed(name: str, where: str, levels: int) -> str:
    """A run with so many brackets in one of its free-form fields, as JSON; the standard encoder has a limit, too."""
    hole: Json = {"x": "@"}
    spec: dict[str, Json] = {
        "args": {"environments": [{"id": "reverse-text", "groupSize": 8, "args": hole}]},
        "options": {"algorithm": {"loss": {"name": "aipo", "options": {"delta": "@"}}}},
        "podTemplate": {"trainer": {"podTemplate": {"spec": hole}}},
        "affinity": {
            "inference": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": hole}}}
        },
        "extraEgress": {"networkPolicy": {"extraEgress": [hole]}},
    }
    deep = "[" * levels + "]" * levels if levels % 2 else '{"a":' * levels + "1" + "}" * levels
    return json.dumps(run(name, **spec[where])).replace('"@"', deep)


def send(world: World, body: str) -> str:
    """Create a run; return the API server's answer as text, as no parser here reads so many brackets."""
    connection = world.kube.connect()
    connection.request("POST", world.path(RUNS, "rlruns"), body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


def refused(cluster: Cluster, namespace: str, manifest: Path) -> str:
    """The API server's refusal of a dry run; empty: it accepts."""
    try:
        cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", str(manifest))
    except ClusterError as error:
        return str(error)
    return ""


def test_brackets_are_refused_when_they_are_written(other: World) -> None:
    for where in FIELDS:
        for levels in LEVELS[1:]:
            answer = send(other, placed("hostile", where, levels))
            assert "lists and mappings: flatten the value" in answer, answer[:1000]
    assert other.kube.items(other.path(RUNS, "rlruns")) == []


@pytest.mark.full
@pytest.mark.usefixtures("unjudged")
@pytest.mark.timeout(240)
def test_runs_of_brackets_are_told_and_stop_nobody(world: World, other: World, operator: OperatorProcess) -> None:
    world.start("healthy", step=1)
    names = []
    for where in FIELDS:
        for levels in LEVELS:
            name = f"{where.lower()}-{levels}"
            answer = send(other, placed(name, where, levels))
            assert '"kind":"RLRun"' in answer, answer[:1000]
            names.append(name)
    for name in names:
        told = wait_for(
            lambda name=name: condition(other, name, "ConfigurationValid"),  # type: ignore[misc]
            lambda said: said.startswith("False"),
            f"{name} is told",
        )
        assert "delta" in told if name.startswith("options") else "levels deep, but at most 32 are allowed" in told, (
            told
        )
    world.renew("healthy", 2)
    world.create("young")
    world.wait_pods_ready("young", 2)
    assert operator.http("/livez")[0] == 200
    assert operator.http("/readyz")[0] == 200
    step = f'rlrun_step{{namespace="{world.namespace}",run="healthy"}}'
    wait_for(lambda: operator.metrics()[step], lambda found: found == 2, "the healthy run's step is seen")

    operator.kill()
    operator.start()  # with all of them in its lists
    world.renew("healthy", 3)
    world.create("younger")
    world.wait_pods_ready("younger", 2)
    wait_for(lambda: world.status("healthy")["progress"]["step"], lambda step: step == 3, "the healthy run goes on")
    other.cluster.kubectl("delete", "rlr", "--all", "-n", other.namespace, "--wait=true")
    assert other.kube.items(other.path(CORE, "pods")) == []
    assert operator.http("/livez")[0] == 200
    operator.check_log()


def condition(world: World, name: str, kind: str) -> str:
    """Status and message of one condition; kubectl answers with nothing of the rest."""
    path = f"{{range .status.conditions[?(@.type=='{kind}')]}}{{.status}} {{.message}}{{end}}"
    return world.cluster.kubectl("get", "rlr", name, "-n", world.namespace, "-o", f"jsonpath={path}")
