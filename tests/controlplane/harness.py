"""The operator as a process of its own, and the part of the pods: what kubelets, trainers and orchestrators would do.

kwok makes pods Running and Ready. Everything that a process inside a pod would cause is caused here: renewed progress Leases, exit
codes, failed pods.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlparse

from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from rlrun.protocol import annotations as told_by
from tests.cluster import Cluster

Json = dict[str, Any]
T = TypeVar("T")
START_SECONDS = 30.0
WAIT_SECONDS = 30.0
RUNS = "/apis/rlrun.io/v1alpha1"
APPS = "/apis/apps/v1"
LEASES = "/apis/coordination.k8s.io/v1"
CORE = "/api/v1"


def wait_for(
    look: Callable[[], T],
    good: Callable[[T], bool],
    what: str,
    *,
    timeout: float = WAIT_SECONDS,
    pause: float = 0.1,
) -> T:
    """Look until it is good.

    Raises:
        AssertionError: after `timeout` seconds, with what was seen last.
    """
    deadline = time.monotonic() + timeout
    while True:
        seen = look()
        if good(seen):
            return seen
        if time.monotonic() >= deadline:
            shown = seen if isinstance(seen, str) else json.dumps(seen, indent=1, default=str)
            raise AssertionError(f"after {timeout:g} s still not: {what}\nseen last: {shown}")
        time.sleep(pause)


class Kube:
    """JSON requests to the API server over one connection; kubectl takes a second of CPU for each."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = Configuration()
        load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._host = urlparse(str(configuration.host))
        self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        self._tls.load_cert_chain(str(configuration.cert_file), configuration.key_file)
        self._connection: http.client.HTTPSConnection | None = None

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, ok: bool = True) -> Json:
        """One request; PATCH is a merge patch.

        Raises:
            AssertionError: it was refused, unless not `ok`: then the refusal is the answer.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        for again in (True, False):
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(
                    self._host.hostname or "", self._host.port, context=self._tls, timeout=10
                )
            try:
                self._connection.request(method, path, data, {"Content-Type": kind})
                response = self._connection.getresponse()
                answer: Json = json.loads(response.read() or b"{}")
                break
            except (OSError, http.client.HTTPException):
                self._connection.close()
                self._connection = None
                if not again:
                    raise
        assert response.status < 400 or not ok, f"{method} {path}: {answer.get('message')}"
        return answer

    def get(self, path: str) -> Json | None:
        """An object, or None."""
        answer = self("GET", path, ok=False)
        return None if answer.get("kind") == "Status" else answer

    def items(self, path: str) -> list[Json]:
        """A list's items."""
        return list(self("GET", path)["items"])


class OperatorProcess:
    """`rlrun-operator` outside the cluster, as an administrator.

    Args:
        environment: more variables.
    """

    def __init__(self, cluster: Cluster, folder: Path, name: str = "operator-0", **environment: str) -> None:
        self.name = name
        self.log_file = folder / f"{name}.log"
        self.port = _free_port()
        self._environment = {
            **cluster.environment,
            "POD_NAME": name,
            "RLRUN_HTTP_PORT": str(self.port),
            "RLRUN_READ_NODES": "true",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> Self:
        """Start it, and wait until it is ready."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from rlrun_operator.main import main; main()"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if ready:
            self.wait_ready()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Wait for /readyz and for leadership."""

        def state() -> str:
            if not self.running:
                return f"ended\n{self.log()}"
            status, text = self.http("/readyz")
            return text if status != 200 else f"ok, leader {self.metric('rlrun_operator_leader'):g}"

        wait_for(
            state, lambda seen: seen == "ok, leader 1", f"operator {self.name} is ready and leads", timeout=timeout
        )

    def stop(self) -> tuple[int, float]:
        """SIGTERM; its exit code and the seconds that it took."""
        assert self._process is not None
        began = time.monotonic()
        self._process.terminate()
        return self._process.wait(timeout=15), time.monotonic() - began

    def wait_exit(self, timeout: float) -> int:
        """Its exit code, once it ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=timeout)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def http(self, path: str) -> tuple[int, str]:
        """Status and text; 0 where nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metrics(self) -> dict[str, float]:
        """All samples: name with labels -> value."""
        lines = [line.rsplit(" ", 1) for line in self.http("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def metric(self, name: str) -> float:
        """Sum of the samples of this name."""
        pattern = re.compile(rf"{name}(\{{|$)")
        return sum(value for sample, value in self.metrics().items() if pattern.match(sample))

    def writes(self) -> dict[tuple[str, str], int]:
        """(verb, resource) -> requests that changed something, the leader Lease's and dry-runs apart."""
        found: dict[tuple[str, str], int] = {}
        for sample, value in self.metrics().items():
            if sample.startswith("rlrun_operator_api_requests_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample))
                own = (labels["verb"], labels["resource"]) == ("patch", "leases")
                if labels["verb"] not in ("get", "list", "dry-run") and not own and "subject" not in labels["resource"]:
                    key = (labels["verb"], labels["resource"])
                    found[key] = found.get(key, 0) + int(value)
        return found

    def log(self) -> str:
        """All that it said."""
        return self.log_file.read_text()


class World:
    """One namespace, and the pods of the runs in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.kube = Kube(cluster.kubeconfig)

    def path(self, api: str, plural: str, name: str = "") -> str:
        """Path of an object or of a list."""
        return f"{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, name: str, **spec: Any) -> None:
        """Create a run: the smallest spec, with `spec` over it."""
        self.kube("POST", self.path(RUNS, "rlruns"), run(name, **spec))

    def edit(self, name: str, spec: Json) -> None:
        """Merge into a run's spec."""
        self.kube("PATCH", self.path(RUNS, "rlruns", name), {"spec": spec})

    def run(self, name: str) -> Json:
        """The run."""
        return self.kube("GET", self.path(RUNS, "rlruns", name))

    def status(self, name: str) -> Json:
        """Its status."""
        return dict(self.run(name).get("status") or {})

    def wait_phase(self, name: str, phase: str, *, attempt: int | None = None, timeout: float = WAIT_SECONDS) -> Json:
        """The status, once the run is in this phase (of this attempt)."""
        return wait_for(
            lambda: self.status(name),
            lambda status: status.get("phase") == phase and attempt in (None, status.get("attempt")),
            f"run {name} is {phase}" + (f" in attempt {attempt}" if attempt else ""),
            timeout=timeout,
        )

    def wait_told(self, name: str, words: str, *, timeout: float = WAIT_SECONDS) -> Json:
        """The status, once its message matches."""
        return wait_for(
            lambda: self.status(name),
            lambda status: re.search(words, status.get("message") or "") is not None,
            f"run {name} says /{words}/",
            timeout=timeout,
        )

    def condition(self, name: str, kind: str) -> Json:
        """One condition; empty when it is not there."""
        found = [c for c in self.status(name).get("conditions", ()) if c["type"] == kind]
        return dict(found[0]) if found else {}

    def pods(self, name: str) -> list[Json]:
        """Pods of a run that have not ended or been deleted."""
        found = self.kube.items(self.path(CORE, "pods") + f"?labelSelector=rlrun.io/run={name}")
        return [p for p in found if "deletionTimestamp" not in p["metadata"] and p["status"]["phase"] != "Succeeded"]

    def wait_pods_ready(self, name: str, count: int, *, timeout: float = WAIT_SECONDS) -> None:
        """Wait until the status counts so many ready trainer and inference pods together."""
        wait_for(
            lambda: self.status(name),
            lambda s: (s.get("trainer") or {}).get("ready", 0) + (s.get("inference") or {}).get("ready", 0) == count,
            f"{count} pods of {name} are ready",
            timeout=timeout,
        )

    def renew(self, name: str, step: int, *, attempt: int = 1, ok: bool = True, **more: object) -> None:
        """The orchestrator tells how far it is; `more`: annotation names in snake case -> values."""
        told = {told_by.STEP: step, told_by.ATTEMPT: attempt, told_by.REWARD: 0.5 + step / 1000}
        told |= {f"rlrun.io/{key.replace('_', '-')}": value for key, value in more.items()}  # type: ignore[misc]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        patch = {
            "metadata": {"annotations": {key: str(value) for key, value in told.items()}},
            "spec": {"renewTime": now, "holderIdentity": f"{name}-orchestrator-{attempt}"},
        }
        self.kube("PATCH", self.path(LEASES, "leases", f"{name}-progress"), patch, ok=ok)

    def start(self, name: str, *, step: int = 1, **spec: Any) -> None:
        """Create a run and let its first attempt train."""
        self.create(name, **spec)
        self.wait_phase(name, "Starting")
        self.wait_pods_ready(name, 2)
        self.renew(name, step)
        self.wait_phase(name, "Running")

    def end_pod(self, pod: str, code: int, message: str = "") -> None:
        """A pod that never restarts (the orchestrator's) ends with this exit code."""
        phase = "Failed" if code else "Succeeded"
        self._set_status(pod, {"phase": phase}, {"state": _terminated(code, message), "ready": False})

    def end_container(self, pod: str, code: int, message: str = "") -> None:
        """The container of a pod that always restarts (a trainer's) ends with this exit code; the exit shim then holds."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        held = {"lastState": _terminated(code, message), "restartCount": 1, "ready": False}
        self._set_status(pod, {}, {**held, "state": {"running": {"startedAt": now}}})

    def _set_status(self, pod: str, status: Json, container: Json) -> None:
        found = self.kube("GET", self.path(CORE, "pods", pod))["status"]
        containers = [{**found["containerStatuses"][0], **container}, *found["containerStatuses"][1:]]
        conditions = [
            {**c, "status": "False"} if c["type"] in ("Ready", "ContainersReady") else c for c in found["conditions"]
        ]
        patch = {"status": {**status, "containerStatuses": containers, "conditions": conditions}}
        self.kube("PATCH", self.path(CORE, "pods", pod) + "/status", patch)

    def delete(self, plural: str, name: str, api: str = CORE) -> None:
        """Delete an object, with a pod's own grace."""
        self.kube("DELETE", self.path(api, plural, name))

    def versions(self, name: str, *, leave_out: tuple[str, ...] = ()) -> dict[str, tuple[str, int]]:
        """All children of a run: kind and name -> resourceVersion and generation."""
        found = {}
        for api, plural in CHILDREN:
            if plural in leave_out:
                continue
            for child in self.kube.items(self.path(api, plural) + f"?labelSelector=rlrun.io/run={name}"):
                meta = child["metadata"]
                found[f"{plural}/{meta['name']}"] = (meta["resourceVersion"], meta.get("generation", 0))
        return found

    def events(self, name: str) -> list[str]:
        """Reasons of the events on a run, oldest first."""
        found = self.kube.items(
            self.path(CORE, "events") + f"?fieldSelector=involvedObject.kind=RLRun,involvedObject.name={name}"
        )
        return [
            e["reason"] for e in sorted(found, key=lambda e: (e["firstTimestamp"], e["metadata"]["resourceVersion"]))
        ]


CHILDREN = (
    (CORE, "pods"),
    (CORE, "services"),
    (CORE, "configmaps"),
    (CORE, "secrets"),
    (CORE, "serviceaccounts"),
    (CORE, "persistentvolumeclaims"),
    (APPS, "statefulsets"),
    (APPS, "deployments"),
    (LEASES, "leases"),
    ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    ("/apis/networking.k8s.io/v1", "networkpolicies"),
)


def run(name: str, **spec: Any) -> Json:
    """A small run."""
    small = {
        "model": {"tiny": {}},
        "maxSteps": 100,
        "seqLen": 512,
        "environments": [{"id": "reverse-text", "groupSize": 8}],
        "orchestrator": {"batchSize": 16},
    }
    metadata = {"name": name}
    return {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata, "spec": {**small, **spec}}


def _terminated(code: int, message: str) -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    reason = "Completed" if code == 0 else "Error"
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": now,
            "finishedAt": now,
        }
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
