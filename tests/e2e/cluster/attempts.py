"""Attempts of untrusted code in the pods of a run to reach other resources, and the targets that each actor may reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, deploy
from tests.e2e.cluster.kube_run import ROOT, KubeRun

Outcomes = Mapping[str, str]

MARK = "ATTEMPTS "
PYTHON = "/opt/rlrun/bin/python"
TABLE = ROOT / "benchmarks/results/attempts.md"
OWN_PROCESSES = {"process: priority of another one", "process: processors of another one"}
"""Actions between processes of one user that share a process namespace; no rule of Landlock refuses them."""
OPEN: Mapping[str, set[str]] = {
    "process": {
        "write: mode of a file of the run",
        "secret: descriptors that it inherited",  # the file of stacks, writable for all processes of a role
        *OWN_PROCESSES,
    },
    "shared": OWN_PROCESSES,
    "own": {
        "write: file in /tmp of the orchestrator",
        "write: socket file in /tmp",
        *OWN_PROCESSES,
    },  # the actor's own /tmp
    "sandbox": set(),
}
"""Allowed targets of each actor. In both kinds of containers these include the processes of the container."""
_IN_SANDBOX = """
import asyncio, json, pathlib, sys
sys.path.insert(0, "/opt/faults")
from attempts_in_a_pod import ATTEMPTS
from rlrun.environments.rewards.code_execution import CodeRunner
program = pathlib.Path("/opt/faults/attempts_in_a_pod.py").read_text()
places = json.loads(sys.argv[1])
async def main():
    runner, found = CodeRunner(), {}
    for name in ATTEMPTS:
        result = await runner.run(program, json.dumps({**places, "only": name}))
        answer = json.loads(result.stdout).get(name) if result.outcome == "ok" else None
        found[name] = answer or f"refused: the program was ended ({result.outcome})"
    print(json.dumps(found))
asyncio.run(main())
"""


def read_outcomes(run: KubeRun, name: str) -> Outcomes:
    """Return the outcome of each attempt of an environment from its log; empty before its first rollout."""
    pod = run.pods("orchestrator")[0]["metadata"]["name"]
    log = f"/data/{run.name}/logs/attempt_0001/orchestrator/environment-{name}.log"
    lines = run.kubectl("exec", pod, "-c", "orchestrator", "--", "cat", log, check=False).splitlines()
    found: Outcomes = next((json.loads(line.partition(MARK)[2]) for line in lines if MARK in line), {})
    return found


def try_in_sandbox(run: KubeRun, places: Mapping[str, Any]) -> Outcomes:
    """Return the outcome of each attempt of a program written by a model."""
    pod = run.pods("orchestrator")[0]["metadata"]["name"]
    said = run.kubectl("exec", pod, "-c", "orchestrator", "--", PYTHON, "-c", _IN_SANDBOX, json.dumps(places))
    found: Outcomes = json.loads(said)
    return found


def find_places(run: KubeRun, other: KubeRun, cluster: Cluster) -> dict[str, Any]:
    """Return arguments of the attempts: targets that an attacker who knows the cluster would choose."""
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


def write_table(found: Mapping[str, Outcomes], file: Path) -> None:
    """Write the outcomes after the text of the page."""
    head = "| attempt | `isolation: Process` | default: shared container | container of `image` | program of a model |"
    rows = [
        f"| {name} | {' | '.join(outcomes[name].partition(' (')[0][:110] for outcomes in found.values())} |"
        for name in found["process"]
    ]
    before = file.read_text().partition(head)[0]
    file.write_text("\n".join([before + head, "|---|---|---|---|---|", *rows, ""]))


def make_attempts(run: KubeRun, places: Mapping[str, Any], image: str) -> dict[str, Outcomes]:
    """Apply a run whose environments make all attempts, and return the outcomes of each actor.

    Args:
        run: run whose orchestrator imports `attempts_in_a_pod` and `intruder_in_a_pod` from `/opt/faults`.
        places: result of `find_places`.
        image: image of the environment that has its own container.
    """
    intruder = {"id": "intruder_in_a_pod:load", "groupSize": 8, "args": dict(places)}
    run.document["spec"]["environments"] = [
        intruder | {"name": "process", "isolation": "Process"},
        intruder | {"name": "shared"},
        intruder | {"name": "own", "image": image, "python": PYTHON},
    ]
    run.apply()
    run.wait_step(1)
    found = {
        name: run.wait(f"attempts of {name}", partial(read_outcomes, run, name), steps=True)
        for name in ("process", "shared", "own")
    }
    return {**found, "sandbox": try_in_sandbox(run, places)}


def check_outcomes(found: Mapping[str, Outcomes]) -> None:
    """Fail if an attempt did not run, or reached a target outside of `OPEN`."""
    assert len(found["process"]) > 60
    for actor, outcomes in found.items():
        assert outcomes.keys() == found["process"].keys()
        assert {name: outcome for name, outcome in outcomes.items() if "failed" in outcome} == {}, actor
        reached = {name: outcome for name, outcome in outcomes.items() if outcome.startswith(("reached", "ended"))}
        assert reached.keys() == OPEN[actor], (actor, reached)
