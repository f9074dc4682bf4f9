"""Runs of one namespace, and the part of their orchestrators: progress Leases that are renewed."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import quote

from rlrun.protocol.messages.lease_annotations import RENEW_SECONDS
from tests.cluster import Cluster
from tests.controlplane.harness import Json
from tests.controlplane.world import CORE, RUNS, World

ENGINES = 2
"""Per run; with one trainer pod and the orchestrator: four pods."""
PODS = ENGINES + 2
SPEC: Json = {"inference": {"replicas": ENGINES}, "maxSteps": 100_000}
CREATORS = 4
"""Requests under way at a time while runs, or objects by hand, are created."""
FIRST_STEP_SECONDS = 3.0
"""From a run's pods being ready to its first trained step."""
_TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"


def limit_seconds(count: int) -> float:
    """Longest time for `count` runs, or for as many pods made by hand."""
    return 120.0 + 3.0 * count


def look_seconds(count: int) -> float:
    """Between two looks at all pods: they cost the API server the same share of a core, however many there are."""
    return max(1.0, count / 250)


def at_once(cluster: Cluster, namespace: str, work: Callable[[World, int], object], count: int) -> float:
    """Do something `count` times over `CREATORS` connections; the seconds that it took."""
    began, each = time.monotonic(), threading.local()

    def one(index: int) -> None:
        if not hasattr(each, "world"):
            each.world = World(cluster, namespace)
        work(each.world, index)

    with ThreadPoolExecutor(CREATORS) as pool:
        list(pool.map(one, range(count)))
    return time.monotonic() - began


def ready_pods(world: World) -> list[str]:
    """Names of the ready pods, by the API server's table: a twentieth of the bytes of a list."""
    return [name for name, ready in pod_rows(world) if len(set(ready.split("/"))) == 1]


def pod_rows(world: World) -> Iterator[tuple[str, str]]:
    """Name and `ready/all` of every pod, as `kubectl get pods` shows them."""
    table = _raw(world, world.path(CORE, "pods") + "?includeObject=None", _TABLE)
    for row in json.loads(table.read())["rows"]:
        yield row["cells"][0], row["cells"][1]


def _raw(world: World, path: str, accept: str = "application/json", seconds: float = 60.0) -> http.client.HTTPResponse:
    connection = world.kube.connect(seconds)
    connection.request("GET", path, headers={"Accept": accept})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"GET {path}: {response.status} {response.read()[:200]!r}")
    return response


@dataclass
class Told:
    """What statuses have said, and when (seconds since the runs were created)."""

    pods: dict[str, float] = field(default_factory=dict)
    """Run -> its workloads are made (`attempt`)."""
    ready: dict[str, float] = field(default_factory=dict)
    """Run -> trainer and engines are ready."""
    running: dict[str, float] = field(default_factory=dict)

    def take(self, run: Json, at: float) -> None:
        """One state of a run."""
        name, status = run["metadata"]["name"], run.get("status") or {}
        engines, trainers = (status.get(role) or {} for role in ("inference", "trainer"))
        if status.get("attempt"):
            self.pods.setdefault(name, at)
        if trainers.get("ready") == 1 and engines.get("ready") == ENGINES:
            self.ready.setdefault(name, at)
        if status.get("phase") == "Running":
            self.running.setdefault(name, at)


class Fleet:
    """All runs of one namespace.

    Args:
        spec: of each run.
    """

    def __init__(self, cluster: Cluster, namespace: str, count: int, spec: Json = SPEC) -> None:
        self.world = World(cluster, namespace)
        self.names = [f"run-{index:05d}" for index in range(count)]
        self.told = Told()
        self.ready: dict[str, float] = {}
        """Run -> when all its pods were seen ready."""
        self.renewals = 0
        self._spec = spec
        self._cluster, self._namespace = cluster, namespace
        self._began = time.monotonic()
        self._due: dict[str, float] = {}
        self._steps = dict.fromkeys(self.names, 0)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        cluster.kubectl("create", "namespace", namespace)

    @property
    def now(self) -> float:
        """Seconds since the creation of the runs began."""
        return time.monotonic() - self._began

    def create(self) -> float:
        """Create all runs; the seconds that it took. Their statuses are followed from now on, and their Leases renewed."""
        self._began = time.monotonic()
        for work in (self._follow, self._renew):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()
        return at_once(
            self._cluster,
            self._namespace,
            lambda world, index: world.create(self.names[index], **self._spec),
            len(self.names),
        )

    def wait_running(self) -> None:
        """Play the orchestrators until all runs are Running.

        Raises:
            SystemExit: not all within the limit.
        """
        limit = limit_seconds(len(self.names))
        while len(self.told.running) < len(self.names):
            if len(self.ready) < len(self.names):
                self._see_pods()
            if self.now > limit:
                made, ready, told, running = map(len, (self.told.pods, self.ready, self.told.ready, self.told.running))
                raise SystemExit(
                    f"after {limit:.0f} s, of {len(self.names)} runs {made} have their pods made, {ready} have them ready, "
                    f"{told} were told so and {running} are Running"
                )
            time.sleep(look_seconds(len(self.names)))

    def _see_pods(self) -> None:
        for run in whole(ready_pods(self.world), PODS):
            if run not in self.ready:
                self.ready[run] = self.now
                self._due[run] = time.monotonic() + FIRST_STEP_SECONDS

    def stop(self) -> None:
        """End the orchestrators' part."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * RENEW_SECONDS)

    def _renew(self) -> None:
        """Each orchestrator trains a step between two renewals, and tells of a checkpoint now and then."""
        world = World(self._cluster, self._namespace)
        while not self._stop.wait(0.05):
            now = time.monotonic()
            for run in [run for run, at in list(self._due.items()) if at <= now]:
                self._steps[run] += 1
                world.renew(run, self._steps[run], checkpoint_step=self._steps[run] // 10)
                self.renewals += 1
                self._due[run] = max(self._due[run] + RENEW_SECONDS, now)
                if self._stop.is_set():
                    return

    def _follow(self) -> None:
        """A watch of the runs, begun again where it ends."""
        world, version = World(self._cluster, self._namespace), "0"
        path = world.path(RUNS, "rlruns")
        while not self._stop.is_set():
            try:
                query = f"?watch=true&allowWatchBookmarks=true&resourceVersion={quote(version)}"
                for line in _lines(_raw(world, path + query)):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        version = "0"
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self.told.take(event["object"], self.now)
                    if self._stop.is_set():
                        return
            except OSError:
                continue


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline():
        yield line


def whole(ready: Iterable[str], pods: int) -> list[str]:
    """Runs of which so many pods are ready, by the pods' names: `<run>-<role>-...`."""
    found: dict[str, int] = {}
    for name in ready:
        run = "-".join(name.split("-")[:2])
        found[run] = found.get(run, 0) + 1
    return [run for run, count in found.items() if count == pods]


def spread(times: Iterable[float]) -> tuple[float, float, float]:
    """Median, 95 % and last of some times."""
    ordered = sorted(times)
    median, most = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95))
    return median, most, ordered[-1]
