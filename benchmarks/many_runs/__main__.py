"""Many runs at once: what the operator costs, in time, requests, memory and CPU, and what it makes others do.

    python -m benchmarks.many_runs [--runs 200] [--write] [--load "nothing else"]

A real control plane on this machine; kwok plays the nodes, this program plays the orchestrators: it renews each run's progress Lease.
The unit is what as many pods of one container cost when somebody creates their StatefulSet, Deployment and Pod by hand, on the same
control plane. The second unit is the same with every child of a run, as the operator renders it: what is left is the operator's part.
`--write` keeps the table in benchmarks/results/many_runs_<runs>.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import aiohttp
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from benchmarks.many_runs import table, usage
from benchmarks.many_runs.by_hand import by_hand, rendered, smallest
from benchmarks.many_runs.fleet import PODS, Fleet
from rlrun_operator.kube.connection import Connection
from tests.cluster import Cluster, up
from tests.controlplane.harness import OperatorProcess
from tests.controlplane.installation import install_crds
from tests.controlplane.world import RUNS, World

RESULTS = Path(__file__).parents[1] / "results"
NAMESPACE = "bench"
PODS_PER_NODE = 100
SAMPLE = 60
"""Runs of which the very children are made by hand: as many more would cost the same each."""
STEADY_SECONDS = 60.0
ALONE_SECONDS = 20.0
"""Without the operator."""
STATUS_WRITES = 100
APPLIES = 300


def measure(count: int, load: str) -> str:
    """Run the benchmark; the table as Markdown."""
    with up(f"bench-{os.getpid()}", nodes=0, tie=True) as cluster, tempfile.TemporaryDirectory() as folder:
        install_crds(cluster)
        cluster.add_fake_nodes(-(-count * PODS // PODS_PER_NODE), prefix="bench")
        say("small pods by hand")
        bare = by_hand(cluster, "bare", count, smallest)
        say(f"{bare}; the children of runs by hand")
        whole = by_hand(cluster, "whole", min(count, SAMPLE), rendered)
        say(f"{whole}; {count} runs")
        fleet = Fleet(cluster, NAMESPACE, count)
        one_apply = asyncio.run(plain_apply_seconds(cluster.kubeconfig))
        own = {"RLRUN_WATCH_NAMESPACES": NAMESPACE, "POD_NAMESPACE": NAMESPACE}
        with OperatorProcess(cluster, Path(folder), **own) as operator:
            start = started(cluster, fleet, operator)
            say("all are Running")
            steady = trained(cluster, fleet, operator)
            one_status = status_write(cluster, fleet.world, fleet.names[1])
            rows = [*table.of_start(start, bare, whole, one_apply, one_status), *table.of_steady(steady, count)]
            print(table.markdown(count, rows, start.writes, load))  # what comes now may fail
            say("the operator starts again")
            again = started_again(fleet, operator)
            fleet.stop()
            operator.check_log()
    return table.markdown(count, [*rows, *table.of_again(again)], start.writes, load)


def say(what: str) -> None:
    """Where the benchmark is."""
    print(f"{time.strftime('%T')} {what}", flush=True)


def started(cluster: Cluster, fleet: Fleet, operator: OperatorProcess) -> table.Start:
    """Create all runs, and wait until all are Running."""
    pids = everything(cluster, operator)
    idle, used, at, reads = usage.memory(pids)[usage.OPERATOR], usage.cpu(pids), time.time(), read_count(operator)
    created = fleet.create()
    fleet.wait_running()
    cpu = usage.spent(used, usage.cpu(pids))
    return table.Start(
        count=len(fleet.names),
        created=created,
        ready=fleet.ready,
        told=fleet.told,
        cpu=cpu,
        memory=usage.memory(pids),
        idle_memory=idle,
        writes=usage.writes(cluster, at, time.time()),
        reads=read_count(operator) - reads,
    )


def trained(cluster: Cluster, fleet: Fleet, operator: OperatorProcess) -> table.Steady:
    """Watch the runs train for a while, and for a moment without the operator, which is dead then."""
    pids, count = everything(cluster, operator), len(fleet.names)
    used, began, renewed = usage.cpu(pids), time.monotonic(), fleet.renewals
    written = operator.writes().get(("patch", "rlruns/status"), 0)
    time.sleep(STEADY_SECONDS)
    seconds = time.monotonic() - began
    cpu, memory = usage.spent(used, usage.cpu(pids)), usage.memory(pids)[usage.OPERATOR]
    per_minute = 60.0 / seconds / count
    renewals = (fleet.renewals - renewed) * per_minute
    statuses = (operator.writes().get(("patch", "rlruns/status"), 0) - written) * per_minute
    operator.kill()
    return table.Steady(seconds, cpu, share_of(cluster, ALONE_SECONDS), renewals, statuses, memory)


def started_again(fleet: Fleet, operator: OperatorProcess) -> table.Again:
    """Start the operator among its runs: it writes nothing but statuses."""
    before = fleet.world.versions(fleet.names[0], leave_out=("leases",))
    began = time.monotonic()
    operator.start(ready=False)
    operator.wait_ready()
    pids = {usage.OPERATOR: operator.pid}
    found = table.Again(time.monotonic() - began, usage.cpu(pids)[usage.OPERATOR], usage.memory(pids)[usage.OPERATOR])
    touched = {key: n for key, n in operator.writes().items() if key[1] not in ("rlruns/status", "events")}
    assert not touched, f"a restarted operator wrote {touched}"
    assert fleet.world.versions(fleet.names[0], leave_out=("leases",)) == before
    return found


def everything(cluster: Cluster, operator: OperatorProcess) -> dict[str, int]:
    """Process ids of the control plane and of the operator."""
    return usage.processes(cluster) | {usage.OPERATOR: operator.pid}


def read_count(operator: OperatorProcess) -> float:
    """Requests of the operator that change nothing."""
    return operator.metric("rlrun_operator_api_requests_total") - sum(operator.writes().values())


def share_of(cluster: Cluster, seconds: float) -> float:
    """The API server's share of a core in the next seconds."""
    pids = usage.processes(cluster)
    used, began = usage.cpu(pids), time.monotonic()
    time.sleep(seconds)
    return usage.spent(used, usage.cpu(pids))[usage.SERVER] / (time.monotonic() - began)


def status_write(cluster: Cluster, world: World, name: str) -> float:
    """CPU seconds of the API server for one write of a training run's status, beside what it needs anyway."""
    path = world.path(RUNS, "rlruns", name) + "/status"
    pids, costs = usage.processes(cluster), []
    for _ in range(3):  # others use the machine: the least disturbed one counts
        idle = share_of(cluster, 5.0)
        used, began = usage.cpu(pids), time.monotonic()
        for number in range(STATUS_WRITES):
            world.kube("PATCH", path, {"status": {"progress": {"tokensPerSecond": number}}})
        spent = usage.spent(used, usage.cpu(pids))[usage.SERVER]
        costs.append((spent - idle * (time.monotonic() - began)) / STATUS_WRITES)
    return min(costs)


async def plain_apply_seconds(kubeconfig: Path) -> float:
    """CPU seconds of one server-side apply of 3 kB by bare aiohttp: the measure of what this machine's cores do."""
    configuration = Configuration()
    load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
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


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("--load", default="nothing else", help="what else uses the machine, for the table")
    arguments = parser.parse_args()
    page = measure(arguments.runs, arguments.load)
    print(page)
    if arguments.write:
        (RESULTS / f"many_runs_{arguments.runs}.md").write_text(page)


if __name__ == "__main__":
    main()
