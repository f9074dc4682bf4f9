"""Hostile objects of one team next to healthy runs of another team on a real API server."""

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
"""Nesting depths: one above the allowed depth; within every parser's limit; above the limits of the operator and
Python, and close to that of the API server."""


@pytest.fixture
def unjudged(cluster: Cluster) -> Iterator[None]:
    """Remove the policy, as on an API server on which it is not installed."""
    cluster.kubectl("delete", "-f", str(POLICY))
    try:
        wait_for(lambda: read_refusal(cluster, "default", BROKEN), lambda message: message == "", "the policy is gone")
        yield
    finally:
        cluster.kubectl("apply", "-f", str(POLICY))
        wait_served(cluster)


@pytest.fixture
def other(cluster: Cluster) -> Iterator[World]:
    """Namespace of the hostile team."""
    with fresh_namespace(cluster) as name:
        yield World(cluster, name)


def render_nested_run(name: str, where: str, levels: int) -> str:
    """Return the JSON of a run with deeply nested brackets in one free-form field; the standard encoder has a depth
    limit, too."""
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
    """Create a run; return the API server's answer as text, because no parser here reads such a nesting depth."""
    connection = world.kube.connect()
    connection.request("POST", world.path(RUNS, "rlruns"), body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


def read_refusal(cluster: Cluster, namespace: str, manifest: Path) -> str:
    """Return the API server's refusal of a dry run, empty if it accepts."""
    try:
        cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", str(manifest))
    except ClusterError as error:
        return str(error)
    return ""


def test_deeply_nested_fields_are_refused_on_create(other: World) -> None:
    for where in FIELDS:
        for levels in LEVELS[1:]:
            answer = send(other, render_nested_run("hostile", where, levels))
            assert "lists and mappings: flatten the value" in answer, answer[:1000]
    assert other.kube.items(other.path(RUNS, "rlruns")) == []


@pytest.mark.full
@pytest.mark.usefixtures("unjudged")
@pytest.mark.timeout(240)
def test_deeply_nested_runs_are_reported_and_others_unaffected(
    world: World, other: World, operator: OperatorProcess
) -> None:
    world.start("healthy", step=1)
    names = []
    for where in FIELDS:
        for levels in LEVELS:
            name = f"{where.lower()}-{levels}"
            answer = send(other, render_nested_run(name, where, levels))
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
    operator.start()  # all hostile runs are in its first list
    world.renew("healthy", 3)
    world.create("younger")
    world.wait_pods_ready("younger", 2)
    wait_for(lambda: world.status("healthy")["progress"]["step"], lambda step: step == 3, "the healthy run goes on")
    other.cluster.kubectl("delete", "rlr", "--all", "-n", other.namespace, "--wait=true")
    assert other.kube.items(other.path(CORE, "pods")) == []
    assert operator.http("/livez")[0] == 200
    operator.check_log()


def condition(world: World, name: str, kind: str) -> str:
    """Return status and message of one condition through kubectl, which filters the rest."""
    path = f"{{range .status.conditions[?(@.type=='{kind}')]}}{{.status}} {{.message}}{{end}}"
    return world.cluster.kubectl("get", "rlr", name, "-n", world.namespace, "-o", f"jsonpath={path}")
