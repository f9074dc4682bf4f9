"""Two hundred runs at once: what the operator costs, in time, requests, memory and CPU.

    python -m benchmarks.runs_200 [--runs 200] [--write]

A real control plane on this machine; kwok plays the nodes, this program plays the orchestrators: it renews each run's progress Lease.
`--write` keeps the table in benchmarks/results/runs_200.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import aiohttp
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from rlrun_operator.connection import Connection
from tests.cluster import Cluster, up
from tests.controlplane.harness import Json, OperatorProcess
from tests.controlplane.installation import install_crds
from tests.controlplane.world import RUNS, World

RESULTS = Path(__file__).parent / "results" / "runs_200.md"
ENGINES = 2
"""Per run; with one trainer pod and the orchestrator: four pods."""
PODS_PER_NODE = 100
RENEW_SECONDS = 10.0
STEADY_SECONDS = 40.0
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
            time.sleep(0.2)
        return seen


def measure(count: int) -> str:
    """Run the benchmark; the table as Markdown."""
    with up(f"bench-{os.getpid()}", nodes=0, tie=True) as cluster, tempfile.TemporaryDirectory() as folder:
        install_crds(cluster)
        cluster.add_fake_nodes(-(-count * (ENGINES + 2) // PODS_PER_NODE), prefix="bench")
        fleet = Fleet(cluster, count)
        one_apply = asyncio.run(plain_apply_seconds(cluster.kubeconfig))
        with OperatorProcess(cluster, Path(folder), RLRUN_WATCH_NAMESPACES="bench", POD_NAMESPACE="bench") as operator:
            idle_memory, idle_cpu = memory(operator), cpu(operator)
            began = time.monotonic()
            fleet.create()
            created = time.monotonic() - began
            running = created + max(fleet.run_until("Running").values())
            writes, dry_runs = operator.writes(), dry_run_count(operator)
            busy_cpu, busy_memory = cpu(operator) - idle_cpu, memory(operator)
            reads = operator.metric("rlrun_operator_api_requests_total") - sum(writes.values()) - dry_runs
            steady_cpu, steady_began = cpu(operator), time.monotonic()
            while time.monotonic() - steady_began < STEADY_SECONDS:
                fleet.renew_due(fleet.statuses())
                time.sleep(0.2)
            steady_cpu = (cpu(operator) - steady_cpu) / (time.monotonic() - steady_began)
            steady_memory = memory(operator)
            before = fleet.world.versions("run-000", leave_out=("leases",))
            operator.kill()
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
