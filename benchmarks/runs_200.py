"""Two hundred runs at once: what the operator costs, in time, requests, memory and CPU.

    python -m benchmarks.runs_200 [--runs 200] [--write]

A real control plane on this machine; kwok plays the nodes, this program plays the orchestrators: it renews each run's progress Lease.
The unit is what as many pods of one container cost when somebody creates their StatefulSet, Deployment and Pod by hand, on the same
control plane. The second unit is the same with every child of a run, as the operator renders it: what is left is the operator's part.
`--write` keeps the table in benchmarks/results/runs_200.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from rlrun.api.resource import RLRunSpec
from rlrun_operator import build
from rlrun_operator.connection import Connection
from rlrun_operator.resources import BY_KIND
from rlrun_operator.settings import RenderSettings
from tests.cluster import Cluster, up
from tests.controlplane.harness import Json, OperatorProcess
from tests.controlplane.installation import install_crds
from tests.controlplane.world import CORE, RUNS, World, run

RESULTS = Path(__file__).parent / "results" / "runs_200.md"
ENGINES = 2
"""Per run; with one trainer pod and the orchestrator: four pods."""
PODS_PER_NODE = 100
RENEW_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""This program lists all runs so often, at the API server's cost."""
STEADY_SECONDS = 60.0
STATUS_WRITES = 100
LIMIT_SECONDS = 600.0
APPLIES = 300
REFERENCE_APPLY_SECONDS = 0.27e-3
"""CPU of one such apply where the goal for a run's CPU was set."""
GOAL_CPU_SECONDS = 20e-3
PURPOSE = {
    ("create", "persistentvolumeclaims"): "the run's volume",
    ("create", "leases"): "where the orchestrator tells its progress",
    ("create", "secrets"): "the engines' API key",
    ("create", "events"): "what the user is told",
    ("apply", "serviceaccounts"): "the orchestrator's account",
    ("apply", "roles"): "its right to that one Lease",
    ("apply", "rolebindings"): "the same",
    ("apply", "configmaps"): "the resolved configuration",
    ("apply", "services"): "names of the trainer's pods and of the engines",
    ("apply", "networkpolicies"): "what the pods may talk to",
    ("apply", "poddisruptionbudgets"): "how many engines a drain may take at once",
    ("apply", "statefulsets"): "the trainer",
    ("apply", "deployments"): "the engines",
    ("apply", "pods"): "the orchestrator",
    ("patch", "rlruns/status"): "the status",
    ("patch", "events"): "an event that repeats",
}


class Fleet:
    """All runs of one namespace, and their orchestrators' part."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.world = World(cluster, "bench")
        cluster.kubectl("create", "namespace", "bench")
        self.names = [f"run-{index:03d}" for index in range(count)]
        self.steps = dict.fromkeys(self.names, 0)
        self._renewed = dict.fromkeys(self.names, 0.0)

    def create(self) -> None:
        """Create all runs."""
        for name in self.names:
            self.world.create(name, inference={"replicas": ENGINES}, maxSteps=100_000)

    def statuses(self) -> dict[str, Json]:
        """Status of every run."""
        items = self.world.kube.items(self.world.path(RUNS, "rlruns"))
        return {item["metadata"]["name"]: item.get("status") or {} for item in items}

    def renew_due(self, statuses: dict[str, Json]) -> None:
        """Each orchestrator whose peers are ready trains a step, and renews its Lease every `RENEW_SECONDS`."""
        for name, status in statuses.items():
            ready = (status.get("trainer") or {}).get("ready") == 1 and (status.get("inference") or {}).get(
                "ready"
            ) == ENGINES
            if ready and time.monotonic() - self._renewed[name] >= RENEW_SECONDS:
                self.steps[name] += 1
                self.world.renew(name, self.steps[name], checkpoint_step=0)
                self._renewed[name] = time.monotonic()

    def run_until(self, phase: str) -> dict[str, float]:
        """Seconds until each run was first seen in this phase.

        Raises:
            SystemExit: not all within `LIMIT_SECONDS`.
        """
        began, seen = time.monotonic(), dict[str, float]()
        while len(seen) < len(self.names):
            statuses = self.statuses()
            now = time.monotonic() - began
            seen |= {n: now for n, s in statuses.items() if s.get("phase") == phase and n not in seen}
            self.renew_due(statuses)
            if now > LIMIT_SECONDS:
                raise SystemExit(f"after {LIMIT_SECONDS:.0f} s only {len(seen)} of {len(self.names)} runs are {phase}")
            time.sleep(LOOK_SECONDS)
        return seen


@dataclass
class ByHand:
    """Cost of objects that nobody's operator made."""

    ready: float
    """Seconds from the first request until all are ready."""
    api_server: float
    """CPU seconds of the API server in that time."""


def smallest(name: str, namespace: str) -> list[Json]:
    """A StatefulSet, a Deployment and a Pod with as many pods as a run has, of one container each."""
    spec = {"containers": [{"name": "main", "image": "bare", "resources": {"requests": {"cpu": "1m"}}}]}
    made: list[Json] = []
    for kind, role, body in (
        ("StatefulSet", "trainer", {"replicas": 1, "serviceName": "none"}),
        ("Deployment", "inference", {"replicas": ENGINES}),
        ("Pod", "orchestrator", None),
    ):
        labels = {"bare": f"{name}-{role}"}
        of_pods = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}}
        metadata = {"name": f"{name}-{role}", "namespace": namespace, "labels": labels}
        whole = spec if body is None else {**body, **of_pods}
        version = "v1" if body is None else "apps/v1"
        made.append({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": whole})
    return made


def rendered(name: str, namespace: str) -> list[Json]:
    """Every child of such a run, as the operator makes it; nobody owns them."""
    spec = RLRunSpec.model_validate(run(name, inference={"replicas": ENGINES}, maxSteps=100_000)["spec"])
    context = build.RunContext(name, namespace, "uid", spec, 1, RenderSettings())
    needs = build.prerequisites(context)
    key = build.api_key_secret(context, "the key of a run")
    made = [dict(child) for child in (*needs.create, key, *needs.apply, *build.workloads(context).made)]
    for child in made:
        child["metadata"] = {k: v for k, v in child["metadata"].items() if k != "ownerReferences"}
    return made


def by_hand(cluster: Cluster, namespace: str, count: int, children: Callable[[str, str], list[Json]]) -> ByHand:
    """Create the children of `count` runs, with one plain POST each, and remove them once their pods are ready."""
    world = World(cluster, namespace)
    cluster.kubectl("create", "namespace", namespace)
    used, began = api_server_cpu(cluster), time.monotonic()
    for index in range(count):
        for child in children(f"run-{index}", namespace):
            world.kube("POST", BY_KIND[child["kind"]].path(namespace), child)
    pods = count * (ENGINES + 2)
    while (ready := _ready_pods(world)) < pods:
        if time.monotonic() - began > LIMIT_SECONDS:
            raise SystemExit(f"after {LIMIT_SECONDS:.0f} s only {ready} of {pods} bare pods are ready")
        time.sleep(0.5)
    found = ByHand(time.monotonic() - began, api_server_cpu(cluster) - used)
    cluster.kubectl("delete", "namespace", namespace, timeout=LIMIT_SECONDS)
    return found


def _ready_pods(world: World) -> int:
    pods = world.kube.items(world.path(CORE, "pods"))
    ready = [c for pod in pods for c in pod["status"].get("conditions", ()) if c["type"] == "Ready"]
    return sum(condition["status"] == "True" for condition in ready)


def status_write(cluster: Cluster, world: World, name: str) -> float:
    """CPU seconds of the API server for one write of a training run's status, beside what it needs anyway."""
    path = world.path(RUNS, "rlruns", name) + "/status"
    idle = api_server_cpu(cluster)
    time.sleep(5.0)
    idle = (api_server_cpu(cluster) - idle) / 5.0
    used, began = api_server_cpu(cluster), time.monotonic()
    for number in range(STATUS_WRITES):
        world.kube("PATCH", path, {"status": {"progress": {"tokensPerSecond": number}}})
    lasted = time.monotonic() - began
    return (api_server_cpu(cluster) - used - idle * lasted) / STATUS_WRITES


def api_server_cpu(cluster: Cluster) -> float:
    """CPU seconds of the API server."""
    text = cluster.kubectl("get", "--raw", "/metrics")
    return float(re.findall(r"^process_cpu_seconds_total (\S+)", text, re.MULTILINE)[0])


def measure(count: int) -> str:
    """Run the benchmark; the table as Markdown."""
    with up(f"bench-{os.getpid()}", nodes=0, tie=True) as cluster, tempfile.TemporaryDirectory() as folder:
        install_crds(cluster)
        cluster.add_fake_nodes(-(-count * (ENGINES + 2) // PODS_PER_NODE), prefix="bench")
        unit = by_hand(cluster, "bare", count, smallest)
        whole = by_hand(cluster, "whole", count, rendered)
        fleet = Fleet(cluster, count)
        one_apply = asyncio.run(plain_apply_seconds(cluster.kubeconfig))
        with OperatorProcess(cluster, Path(folder), RLRUN_WATCH_NAMESPACES="bench", POD_NAMESPACE="bench") as operator:
            idle_memory, idle_cpu = memory(operator), cpu(operator)
            busy_server = api_server_cpu(cluster)
            began = time.monotonic()
            fleet.create()
            created = time.monotonic() - began
            running = created + max(fleet.run_until("Running").values())
            writes, dry_runs = operator.writes(), dry_run_count(operator)
            busy_cpu, busy_memory = cpu(operator) - idle_cpu, memory(operator)
            busy_server = api_server_cpu(cluster) - busy_server
            reads = operator.metric("rlrun_operator_api_requests_total") - sum(writes.values()) - dry_runs
            steady_cpu, steady_began, steady_server = cpu(operator), time.monotonic(), api_server_cpu(cluster)
            steady_writes = sum(operator.writes().values())
            while time.monotonic() - steady_began < STEADY_SECONDS:
                fleet.renew_due(fleet.statuses())
                time.sleep(LOOK_SECONDS)
            steady_seconds = time.monotonic() - steady_began
            steady_cpu = (cpu(operator) - steady_cpu) / steady_seconds
            steady_server = (api_server_cpu(cluster) - steady_server) / steady_seconds
            steady_writes = (sum(operator.writes().values()) - steady_writes) / count / steady_seconds * 60
            steady_memory = memory(operator)
            before = fleet.world.versions("run-000", leave_out=("leases",))
            operator.kill()
            of_status = status_write(cluster, fleet.world, "run-001")
            began = time.monotonic()
            operator.start()
            cold = time.monotonic() - began
            cold_cpu = cpu(operator)
            fleet.renew_due(fleet.statuses())
            touched = {key: n for key, n in operator.writes().items() if key[1] != "rlruns/status"}
            assert not touched, f"a restarted operator wrote {touched}"
            assert fleet.world.versions("run-000", leave_out=("leases",)) == before
            log = operator.log()
            assert "Traceback" not in log, log
    per_run = {key: value / count for key, value in writes.items()}
    total = sum(per_run.values())
    rows = [
        ("all runs created", f"{created:.1f} s", ""),
        ("all runs Running", f"{running:.1f} s", ""),
        ("as many small pods created by hand: all ready", f"{unit.ready:.1f} s", ""),
        ("the very children of the runs created by hand: all ready", f"{whole.ready:.1f} s", ""),
        ("all runs Running, in that unit", f"{running / unit.ready:.1f}", "≤ 1.6"),
        ("API server's CPU, create to Running", f"{busy_server:.1f} s", ""),
        ("API server's CPU, as many small pods created by hand", f"{unit.api_server:.1f} s", ""),
        ("API server's CPU, in that unit", f"{busy_server / unit.api_server:.1f}", "≤ 1.6"),
        ("API server's CPU, the very children created by hand", f"{whole.api_server:.1f} s", ""),
        ("API server's CPU, in that other unit", f"{busy_server / whole.api_server:.1f}", ""),
        ("API server's CPU for one write of a status", f"{of_status * 1000:.1f} ms", "≤ 4 ms"),
        ("API writes per run, create to Running", f"{total:.1f}", "≤ 25"),
        ("dry-runs per run (they write nothing)", f"{dry_runs / count:.1f}", ""),
        ("API reads per run", f"{reads / count:.1f}", ""),
        ("operator CPU per run, create to Running", f"{busy_cpu / count * 1000:.1f} ms", ""),
        ("CPU of one plain apply by bare aiohttp, on these cores", f"{one_apply * 1000:.2f} ms", ""),
        (
            "operator CPU per run, in plain applies",
            f"{busy_cpu / count / one_apply:.0f}",
            f"≤ {GOAL_CPU_SECONDS / REFERENCE_APPLY_SECONDS:.0f} (20 ms where an apply takes 0.27 ms)",
        ),
        (
            "operator memory (RSS): idle / all Running / later",
            f"{idle_memory:.0f} / {busy_memory:.0f} / {steady_memory:.0f} MB",
            "≤ 150 MB",
        ),
        (
            f"operator CPU while all train (Leases renewed every {RENEW_SECONDS:.0f} s)",
            f"{steady_cpu * 100:.1f} % of a core",
            "",
        ),
        (
            "API server's CPU in that time, this program's requests included",
            f"{steady_server * 100:.1f} % of a core",
            "",
        ),
        ("the operator's writes per run and minute in that time", f"{steady_writes:.1f}", "≤ 1"),
        (
            "operator killed and started again: ready",
            f"{cold:.1f} s, {cold_cpu:.1f} s of CPU, no write but to the status",
            "≤ 5 s",
        ),
    ]
    lines = [
        f"# {count} runs of {ENGINES + 2} pods on one control plane",
        "",
        f"`python -m benchmarks.runs_200 --runs {count}`; {os.cpu_count()} cores ({platform.machine()}), shared by the API server,",
        "etcd, the controllers, kwok, this program and the operator.",
        "",
        "| figure | value | goal |",
        "|---|---|---|",
        *(f"| {name} | {value} | {goal} |" for name, value, goal in rows),
        "",
        "| the operator's writes | per run | for |",
        "|---|---|---|",
        *(
            f"| {verb} {resource} | {value:.2f} | {PURPOSE.get((verb, resource), '')} |"
            for (verb, resource), value in sorted(per_run.items(), key=lambda item: -item[1])
        ),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


async def plain_apply_seconds(kubeconfig: Path) -> float:
    """CPU seconds of one server-side apply of 3 kB by bare aiohttp: the measure of what this machine's cores do."""
    configuration = Configuration()
    load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    connection = Connection(configuration)
    url = f"{connection.server}/api/v1/namespaces/default/configmaps/measure"
    headers, query = {"Content-Type": "application/apply-patch+yaml"}, {"fieldManager": "bench", "force": "true"}

    async def apply(session: aiohttp.ClientSession, number: int) -> None:
        metadata = {"name": "measure", "namespace": "default"}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": str(number) * 3000}}
        async with session.patch(url, params=query, data=json.dumps(body), headers=headers) as response:
            json.loads(await response.read())

    async with connection.session() as session:
        await apply(session, 0)
        began = time.thread_time()
        for number in range(APPLIES):
            await apply(session, number)
        return (time.thread_time() - began) / APPLIES


def cpu(operator: OperatorProcess) -> float:
    """CPU seconds of the process."""
    return operator.metric("process_cpu_seconds_total")


def memory(operator: OperatorProcess) -> float:
    """Resident memory in MB (10⁶ bytes)."""
    return operator.metric("process_resident_memory_bytes") / 1e6


def dry_run_count(operator: OperatorProcess) -> float:
    """Requests with dryRun=All."""
    return sum(v for k, v in operator.metrics().items() if "api_requests_total" in k and 'verb="dry-run"' in k)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    table = measure(arguments.runs)
    print(table)
    if arguments.write:
        RESULTS.write_text(table)


if __name__ == "__main__":
    main()
