"""The boundaries of docs/security.md, tested from inside the pods of a run for each actor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.cluster import Cluster, deploy
from tests.cluster.images import BuiltImage
from tests.e2e.cluster.kube_run import KubeRun

NewRun = Callable[[dict[str, Any]], KubeRun]
StubManifest = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(1200)  # the first test starts the cluster

STORE, CHANNEL, POD, ENGINE, METRICS, FREE = 29500, 29600, 29601, 8000, 9100, 40001
PYTHON = "/opt/rlrun/bin/python"
_KNOCK = """
import json, socket, sys, threading
found = {}
def knock(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
        found[f"{host}:{port}"] = True
    except ConnectionRefusedError:  # nobody listens, but the way is open
        found[f"{host}:{port}"] = True
    except OSError:
        found[f"{host}:{port}"] = False
threads = [threading.Thread(target=knock, args=(host, int(port))) for host, port in (t.rsplit(":", 1) for t in sys.argv[1:])]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(found))
"""


def probe_targets(run: KubeRun, pod: str, targets: Iterable[tuple[str, int]], container: str) -> set[tuple[str, int]]:
    """Return the addresses that accept or refuse a TCP connection of a container, instead of dropping it."""
    addresses = [f"{host}:{port}" for host, port in targets]
    said = run.kubectl("exec", pod, "-c", container, "--", PYTHON, "-c", _KNOCK, *addresses)
    places = (key.rsplit(":", 1) for key, is_open in json.loads(said).items() if is_open)
    return {(host, int(port)) for host, port in places}


def test_pods_reach_only_ports_of_their_role(new_run: NewRun, stub_manifest: StubManifest, cluster: Cluster) -> None:
    run = new_run(stub_manifest("doors", steps=1000, inference={"replicas": 1}))
    other = new_run(stub_manifest("open-neighbour", steps=1000, networkPolicy={"mode": "None"}))
    run.apply()
    other.apply()
    run.wait_step(1)
    other.wait_step(1)
    address = {role: run.pods(role)[0]["status"]["podIP"] for role in ("trainer", "inference", "orchestrator")}
    name = {role: run.pods(role)[0]["metadata"]["name"] for role in address}
    server = json.loads(cluster.kubectl("get", "endpointslice", "kubernetes", "-n", "default", "-o", "json"))
    api = server["endpoints"][0]["addresses"][0], server["ports"][0]["port"]
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    hosts = {a["address"] for node in nodes for a in node["status"]["addresses"] if a["type"] == "InternalIP"}
    inside = [(ip, port) for ip in address.values() for port in (STORE, CHANNEL, POD, ENGINE, METRICS, FREE)]
    outside = [(ip, port) for ip in sorted(hosts) for port in (443, 6443, 10250) if (ip, port) != api]
    strangers = [(pod["status"]["podIP"], port) for pod in other.pods("inference") for port in (ENGINE, 443)]
    doors = {(address["trainer"], CHANNEL), (address["inference"], ENGINE), api}
    own = {(address["trainer"], port) for port in (STORE, CHANNEL, POD, ENGINE, METRICS, FREE)}
    expected = {"trainer": own, "inference": set(), "orchestrator": doors}
    found = {
        role: probe_targets(run, pod, [*inside, *outside, *strangers, api], role)
        - {(address[role], port) for _, port in inside if role != "trainer"}  # a pod always reaches its own ports
        for role, pod in name.items()
    }
    assert found == expected
    stranger = other.pods("orchestrator")[0]["metadata"]["name"]
    assert probe_targets(other, stranger, inside, "orchestrator") == set(), "a pod that nothing restricts"
    operator = json.loads(cluster.kubectl("get", "pods", "-n", deploy.SYSTEM, "-o", "json"))["items"]
    metrics = [(pod["status"]["podIP"], 8080) for pod in operator if pod["status"].get("podIP")]
    assert metrics
    assert probe_targets(other, stranger, metrics, "orchestrator") == set(), "the operator's own policy"


_LOOK = """
import json, os, pathlib
def tried(deed):
    try:
        deed()
        return "done"
    except OSError as error:
        return os.strerror(error.errno)
folder = pathlib.Path("/run/rlrun-environments")
print(json.dumps({
    "uid": os.getuid(),
    "key": [k for k in os.environ if "KEY" in k or "TOKEN" in k],
    "secrets": sorted(str(p) for p in pathlib.Path("/var/run/secrets").rglob("*")) if os.path.isdir("/var/run/secrets") else [],
    "runs": sorted(os.listdir("/data")) if os.path.isdir("/data") else None,
    "config": os.path.exists("/etc/rlrun/run.json"),
    "code": tried(lambda: (folder / "code/rlrun/__init__.py").write_text("raise SystemExit")),
    "folders": sorted(os.listdir(folder)),
    "tmp": tried(lambda: pathlib.Path("/tmp/left-by-environment").write_text("x")),
    "root": tried(lambda: pathlib.Path("/usr/left").write_text("x")),
}))
"""


def test_environment_container_cannot_read_files_of_others(
    new_run: NewRun, stub_manifest: StubManifest, images: Mapping[str, BuiltImage]
) -> None:
    apart = {"groupSize": 8, "image": images["stub"].reference, "python": PYTHON}
    environments = [{"id": "reverse-text", **apart}, {"id": "arithmetic", **apart}]
    run = new_run(stub_manifest("fenced", steps=1000, environments=environments))
    run.apply()
    run.wait_step(1)
    name = run.pods("orchestrator")[0]["metadata"]["name"]
    found = [
        json.loads(run.kubectl("exec", name, "-c", f"environment-{index}", "--", PYTHON, "-c", _LOOK))
        for index in (0, 1)
    ]
    for index, seen in enumerate(found):
        assert seen == {
            "uid": 1001 + index,
            "key": [],
            "secrets": [],
            "runs": None,
            "config": False,
            "code": "Read-only file system",
            "folders": [str(index), "code"],
            "tmp": "done",
            "root": "Read-only file system",
        }
    left = "import os; print(os.path.exists('/tmp/left-by-environment'), os.getuid())"
    assert run.kubectl("exec", name, "-c", "orchestrator", "--", PYTHON, "-c", left).split() == ["False", "1000"]
    write = "open('/run/rlrun-environments/0/planted', 'w')"
    said = run.kubectl("exec", name, "-c", "orchestrator", "--", PYTHON, "-c", write, check=False)
    assert "planted" not in run.kubectl("exec", name, "-c", "environment-0", "--", "ls", "/run/rlrun-environments/0"), (
        said
    )


_LOOK_FROM_SHARED = """
import json, os, pathlib
def tried(deed):
    try:
        deed()
        return "done"
    except OSError as error:
        return os.strerror(error.errno)
def read(path):
    try:
        return path.read_bytes()
    except OSError:  # closed, as keepers are
        return b""
processes = [p for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and p.name != str(os.getpid())]
commands = [read(p / "cmdline") for p in processes]
variables = {v for p in processes if b"process.worker" in read(p / "cmdline") for v in read(p / "environ").split(b"\\0")}
print(json.dumps({
    "uid": os.getuid(),
    "key": [k for k in os.environ if "KEY" in k or "TOKEN" in k],
    "passed": sorted(v.decode() for v in variables if v.startswith((b"TEAM_", b"RLRUN_API"))),
    "secrets": os.path.isdir("/var/run/secrets"),
    "config": os.path.exists("/etc/rlrun/run.json"),
    "runs": sorted(os.listdir("/data")),
    "workers": sum(b"process.worker" in c for c in commands),
    "roles": sum(b"rlrun.orchestrator" in c or b"rlrun.tracking" in c for c in commands),
    "run": tried(lambda: pathlib.Path("/data/shares/planted").write_text("x")),
    "cache": tried(lambda: pathlib.Path("/data/shares/.huggingface/hub/x").write_text("x")),
    "modules": tried(lambda: pathlib.Path("/data/shares/.huggingface/modules").mkdir()),
}))
"""


def test_environments_without_image_share_container_without_secrets(
    new_run: NewRun, stub_manifest: StubManifest
) -> None:
    apart = {"groupSize": 8}
    shared = [{"id": "reverse-text", "variables": ["TEAM_A"], **apart}, {"id": "arithmetic", **apart}]
    inside = {"id": "calculator", "groupSize": 8, "isolation": "Process"}
    env = [{"name": "TEAM_A", "value": "a"}, {"name": "TEAM_B", "value": "b"}]
    run = new_run(stub_manifest("shares", steps=1000, environments=[*shared, inside], orchestrator={"env": env}))
    run.apply()
    run.wait_step(3)
    name = run.pods("orchestrator")[0]["metadata"]["name"]

    def look(container: str) -> Any:
        return json.loads(run.kubectl("exec", name, "-c", container, "--", PYTHON, "-c", _LOOK_FROM_SHARED))

    keepers_and_workers = 2
    assert look("environments") == {
        "uid": 1000,
        "key": [],
        "passed": ["TEAM_A=a"],
        "secrets": False,
        "config": False,
        "runs": ["shares"],
        "workers": len(shared) * keepers_and_workers,
        "roles": 0,
        "run": "Read-only file system",
        "cache": "done",
        "modules": "Read-only file system",
    }
    assert look("orchestrator")["workers"] == keepers_and_workers
    run.kubectl("exec", name, "-c", "environments", "--", PYTHON, "-c", "import os; os.kill(1, 15)")

    def restarts() -> int:
        (pod,) = run.pods("orchestrator")
        (found,) = (c for c in pod["status"]["initContainerStatuses"] if c["name"] == "environments")
        return int(found["restartCount"])

    run.wait("the container started again", restarts)
    run.wait_step(run.step() + 5)
    assert look("environments")["workers"] == len(shared) * keepers_and_workers
    assert "was in a container that ended" in run.kubectl("logs", name, "-c", "orchestrator")


_WRITE = """
import json, os, sys
found = {}
for path in sys.argv[1:]:
    try:
        os.mkdir(path)
        os.rmdir(path)
        found[path] = "done"
    except OSError as error:
        found[path] = os.strerror(error.errno)
print(json.dumps(found))
"""


def test_pods_cannot_write_to_folder_of_other_run(new_run: NewRun, stub_manifest: StubManifest) -> None:
    neighbour = new_run(stub_manifest("writes-first", steps=3))
    neighbour.apply()
    neighbour.wait_phase("Complete")
    run = new_run(stub_manifest("writes-second", steps=1000, storage={"claimName": "writes-first-data"}))
    run.apply()
    run.wait_step(1)
    tried = {
        "/data/writes-second/x": "done",
        "/data/writes-second/weights/x": "done",
        "/data/writes-first/x": "Read-only file system",
        "/data/writes-first/checkpoints/x": "Read-only file system",
        "/data/third": "Read-only file system",
        "/data/.huggingface": "Read-only file system",
    }
    for role in ("trainer", "inference", "orchestrator"):
        name = run.pods(role)[0]["metadata"]["name"]
        assert json.loads(run.kubectl("exec", name, "-c", role, "--", PYTHON, "-c", _WRITE, *tried)) == tried, role
