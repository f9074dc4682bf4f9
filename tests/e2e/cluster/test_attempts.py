"""Attempts of untrusted code on what is beside it, in the pods of a run: docs/security.md's rows on environments and on programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.cluster import Cluster, deploy
from tests.cluster.images import BuiltImage
from tests.e2e.cluster.kube_run import KubeRun

NewRun = Callable[[dict[str, Any]], KubeRun]
StubManifest = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(1200)

MARK = "ATTEMPTS "
PYTHON = "/opt/rlrun/bin/python"
_IN_SANDBOX = """
import asyncio, json, pathlib, sys
sys.path.insert(0, "/opt/faults")
from attempts_in_a_pod import ATTEMPTS
from rlrun.environments.rewards.code import CodeRunner
program = pathlib.Path("/opt/faults/attempts_in_a_pod.py").read_text()
places = json.loads(sys.argv[1])
async def main():
    runner, found = CodeRunner(), {}
    for name in ATTEMPTS:
        result = await runner.run(program, json.dumps({**places, "only": name}))
        answer = json.loads(result.stdout).get(name) if result.outcome == "ok" else None
        found[name] = answer or f"refused: the program was ended ({result.outcome}) {result.stderr[-150:]}"
    print(json.dumps(found))
asyncio.run(main())
"""


def read_outcomes(run: KubeRun, name: str) -> dict[str, str]:
    """Outcome of each attempt of an environment, from its log; empty before its first rollout."""
    pod = run.pods("orchestrator")[0]["metadata"]["name"]
    log = f"/data/{run.name}/logs/attempt_0001/orchestrator/environment-{name}.log"
    lines = run.kubectl("exec", pod, "-c", "orchestrator", "--", "cat", log, check=False).splitlines()
    found: dict[str, str] = next((json.loads(line.partition(MARK)[2]) for line in lines if MARK in line), {})
    return found


def try_in_sandbox(run: KubeRun, places: Mapping[str, Any]) -> dict[str, str]:
    """Outcome of each attempt of a program that a model wrote."""
    pod = run.pods("orchestrator")[0]["metadata"]["name"]
    said = run.kubectl("exec", pod, "-c", "orchestrator", "--", PYTHON, "-c", _IN_SANDBOX, json.dumps(places))
    found: dict[str, str] = json.loads(said)
    return found


def find_places(run: KubeRun, other: KubeRun, cluster: Cluster) -> dict[str, Any]:
    """Arguments of the attempts: what somebody who knows the cluster would aim at."""
    server = json.loads(cluster.kubectl("get", "endpointslice", "kubernetes", "-n", "default", "-o", "json"))
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    operator = json.loads(cluster.kubectl("get", "pods", "-n", deploy.SYSTEM, "-o", "json"))["items"]
    return {
        "run": f"/data/{run.name}",
        "trainer": f"{run.name}-trainer-0.{run.name}-trainer",
        "inference": f"{run.name}-inference",
        "operator": operator[0]["status"]["podIP"],
        "node": next(a["address"] for a in nodes[0]["status"]["addresses"] if a["type"] == "InternalIP"),
        "other_inference": other.pods("inference")[0]["status"]["podIP"],
        "other_trainer": other.pods("trainer")[0]["status"]["podIP"],
        "metadata": "169.254.169.254",
        "api": server["endpoints"][0]["addresses"][0],
        "api_port": server["ports"][0]["port"],
        "namespace": run.namespace,
    }


def test_attempts(
    new_run: NewRun, stub_manifest: StubManifest, cluster: Cluster, images: Mapping[str, BuiltImage]
) -> None:
    other = new_run(stub_manifest("aimed-at", steps=1000))
    other.apply()
    other.wait_step(1)
    run = new_run(stub_manifest("attempted", steps=1000))
    places = find_places(run, other, cluster)
    intruder = {"id": "intruder_in_a_pod:load", "groupSize": 8, "args": places}
    run.document["spec"]["environments"] = [
        intruder | {"name": "beside", "isolation": "Process"},
        intruder | {"name": "shared", "isolation": "Container"},
        intruder | {"name": "apart", "image": images["stub"].reference, "python": PYTHON},
    ]
    run.apply()
    run.wait_step(1)
    found = {
        name: run.wait(f"attempts of {name}", lambda name=name: read_outcomes(run, name), steps=True)
        for name in ("beside", "shared", "apart")
    }
    found["sandbox"] = try_in_sandbox(run, places)
    print(json.dumps(found))
