"""`python -m tests.processes.chart.exporters`: the product's real exporters with replayed runs, until standard input ends.

Prints one JSON line: the port of each exporter by name. A leading and a standby operator share their view of four runs: `good` trains,
`bad` cannot write and makes no progress, `late` waits in the queue, `new` is without status. The pods belong to `good`; one of them
(`forged`) claims another run and namespace.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from rlrun.orchestrator.progress.exposition import EngineLook, Measures, StepTotals
from rlrun.orchestrator.progress.progress_server import Progress, ProgressServer
from rlrun.pod import gpu_metrics, rendezvous
from rlrun.pod.gpu_metrics import PodMetrics
from rlrun.runtime.http_site import Site
from rlrun.runtime.nvml import Sample
from rlrun_operator.kube.resources import WATCHED
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.runtime.watch_health import Health, serve_health
from tests.processes.chart.replay import STEP_METRICS

KEY = "k" * 32
BEAT_SECONDS = 0.2
SITES: list[Site] = []
"""Servers of this process; an unreferenced server is garbage-collected and its socket is closed."""
FORGED = 'rlrun_loss{namespace="team-b",run="theirs",attempt="7"} 1\n'


def make_run(name: str, status: dict[str, Any] | None) -> dict[str, Any]:
    """Return an RLRun in namespace team-a as the API server returns it."""
    metadata = {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "resourceVersion": "1"}
    body = {"kind": "RLRun", "apiVersion": "rlrun.io/v1alpha1", "metadata": metadata}
    return body | {"spec": {"model": {"name": "Qwen/Qwen3-8B"}}} | ({} if status is None else {"status": status})


def make_condition(type_: str, status: str, reason: str) -> dict[str, str]:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def format_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_fleet(beat: int) -> Iterator[dict[str, Any]]:
    """Return the runs after `beat` beats."""
    progress = {"step": 10 + beat, "totalSteps": 1000, "reward": 0.5, "lastStepTime": format_now()}
    trains = {"phase": "Running", "attempt": 1, "progress": progress, "restarts": 1, "restartsCountedTowardsMax": 1}
    row = {"attempt": 1, "role": "trainer", "gpuSeconds": {"trained": 90 * beat, "waitedForRollouts": 10 * beat}}
    counted = {"gpuHours": 1.0, "countedTo": "2026-01-01T00:00:00Z", "attempts": [row]}
    engines = {"desired": 4, "ready": 3, "spot": {"desired": 2, "ready": 1, "lost": 1}}
    made = {"trainer": {"desired": 1, "ready": 1}, "inference": engines, "cost": counted}
    yield make_run("good", trains | made | {"conditions": [make_condition("Progressing", "True", "Training")]})
    stands = {"step": 3, "totalSteps": 1000, "reward": 0.0, "lastStepTime": "2026-01-01T00:00:00Z"}
    wrong = [
        make_condition("Progressing", "False", "NoProgress"),
        make_condition("StorageReady", "False", "StorageFull"),
    ]
    wrong.append(make_condition("WithinBudget", "True", "BudgetNearlySpent"))
    yield make_run(
        "bad",
        {"phase": "Running", "attempt": 4, "restarts": beat, "progress": stands, "conditions": wrong, "cost": counted},
    )
    yield make_run("late", {"phase": "Queued", "queue": {"since": format_now(), "position": 1, "waiting": 1}})
    yield make_run("new", None)


class Operators:
    """Metrics of two processes over one view of the cluster."""

    def __init__(self) -> None:
        self._store = Store()
        self._both = [Metrics(self._store), Metrics(self._store)]

    async def start(self) -> dict[str, int]:
        """Serve both operators; return their ports."""
        ports = {}
        for name, metrics, leads in zip(("operator", "standby"), self._both, (1.0, 0.0), strict=True):
            metrics.observe_queue(lambda: 1.0, lambda: 0.5, lambda leads=leads: leads)  # type: ignore[misc]
            for resource in WATCHED:
                metrics.observe_watch(resource.plural, None, lambda: 3.0)
            metrics.observe_places([("team-a", None)], [("team-b", None)])
            refresh = [lambda metrics=metrics: metrics.observe_objects(self._store.count())]
            site = await serve_health(Health(before_scrape=refresh), metrics.registry, 0)  # type: ignore[arg-type]
            SITES.append(site)
            # With port 0, each address family gets its own port.
            ports[name] = next(port for host, port, *_ in site._runner.addresses if host == "0.0.0.0")
        return ports

    def beat(self, number: int) -> None:
        """Simulate one period of work by the leader."""
        acts = self._both[0]
        for document in make_fleet(number):
            document["metadata"]["resourceVersion"] = str(number + 2)
            self._store.put(document, time.monotonic())
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        labels = {"rlrun.io/run": "good", "rlrun.io/role": "trainer"}
        metadata = {"name": "good-trainer-1-0", "namespace": "team-a", "uid": "p", "labels": labels}
        pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata | {"resourceVersion": str(number + 2)}}
        spec = {"nodeName": "n", "containers": [{"name": "trainer", **limits}]}
        self._store.put(pod | {"spec": spec, "status": {"phase": "Running"}}, time.monotonic())
        for verb, code in (("patch", "200"), ("patch", "409")):
            acts.count_request(verb, "rlruns", code)
        acts.reconcile_seconds.labels("acted").observe(0.02)
        old, new = ("Starting", "Running") if number % 2 else ("Running", "Starting")
        acts.status_written(("team-a", "good"), {"phase": old}, {"phase": new}, time.monotonic())
        failed = {"restarts": number + 1, "lastFailure": {"reason": "OOMKilled"}}
        acts.status_written(("team-a", "bad"), {"restarts": number}, failed, time.monotonic())


class Replay:
    """Replay of a run's `metrics.jsonl`, one step every few beats."""

    def __init__(self) -> None:
        self._step, self._totals = 10, StepTotals()

    def beat(self, number: int) -> None:
        if number % 3 == 0:
            self._step += 1
            self._totals.trained(STEP_METRICS)

    def progress(self) -> Progress:
        return Progress(
            step=self._step,
            max_steps=1000,
            policy_version=self._step,
            checkpoint_step=10,
            resumed_from_step=None,
            reward=STEP_METRICS["reward/mean"],
            eval={"arithmetic": 0.4},
            tokens_per_second=STEP_METRICS["perf/throughput"],
            staleness_mean=STEP_METRICS["off_policy/mean"],
            waiting_on="",
            eta_seconds=600.0,
            in_flight=8,
            errors=self._step,
            waiting_role="orchestrator",
        )

    def measures(self) -> Measures:
        engines = [EngineLook("serving", 4, 1, 0.6), EngineLook("updating", 0, 0, 0.1)]
        return Measures(STEP_METRICS, self._totals, engines, (10 << 30, 100 << 30))


class TwoGpus:
    """One busy and one idle GPU."""

    def sample_gpus(self) -> Sequence[Sample]:
        return [Sample(0.95, 70 << 30, 80 << 30), Sample(0.0, 1 << 30, 80 << 30)]


def pod_server() -> int:
    """Start the HTTP server of a trainer or engine pod; return its port."""
    rendezvous.POD_PORT = 0
    metrics = PodMetrics(TwoGpus)
    server = rendezvous.PodServer("127.0.0.1", attempt=1, api_key=KEY, look=lambda: None, metrics=metrics.text)
    return int(server._server.server_address[1])


async def serve_forged_metrics() -> int:
    """Start a pod that claims to belong to another run; return its port."""
    app = web.Application()
    app.router.add_get("/metrics", lambda _: _respond(FORGED))
    site = Site(app)
    await site.start("127.0.0.1", 0)
    SITES.append(site)
    return site.port


async def _respond(text: str) -> web.Response:
    return web.Response(text=text)


async def main() -> None:
    """Serve all exporters until standard input ends."""
    gpu_metrics.SAMPLE_SECONDS = BEAT_SECONDS
    operators, replay = Operators(), Replay()
    ports = await operators.start() | {
        "trainer": pod_server(),
        "inference": pod_server(),
        "forged": await serve_forged_metrics(),
    }
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    progress = ProgressServer("127.0.0.1", 0, api_key=KEY, look=replay.progress, measures=replay.measures)
    async with progress:
        assert progress._site is not None
        print(json.dumps(ports | {"orchestrator": progress._site.port}), flush=True)
        number = 0
        while not ended.done():
            operators.beat(number)
            replay.beat(number)
            number += 1
            await asyncio.wait([ended], timeout=BEAT_SECONDS)


if __name__ == "__main__":
    asyncio.run(main())
