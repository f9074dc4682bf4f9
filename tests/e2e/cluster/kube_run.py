"""One RLRun on a cluster under test."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster, ClusterError
from tests.controlplane.harness import Kube
from tests.support.waiting import LONG_POLL_SECONDS, Wait

_KILL = """
import os, pathlib, signal, sys
killed = 0
for folder in pathlib.Path('/proc').iterdir():
    if folder.name.isdigit() and int(folder.name) not in (1, os.getpid()):
        try:
            line = (folder / 'cmdline').read_bytes().decode().replace(chr(0), ' ')
        except OSError:
            continue
        if sys.argv[1] in line and 'torchrun' not in line:
            os.kill(int(folder.name), signal.SIGKILL)
            killed += 1
print(killed)
"""
ROOT = Path(__file__).resolve().parents[3]


def example(name: str, **spec: Any) -> dict[str, Any]:
    """Return a manifest of `examples/` with some top-level spec fields merged one level deep."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    for key, value in spec.items():
        old = document["spec"].get(key)
        document["spec"][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return document


class KubeRun:
    """A run by its name. Writes use kubectl like a user; reads do not, because each kubectl costs 0.3 s of CPU time."""

    def __init__(self, cluster: Cluster, document: dict[str, Any], namespace: str) -> None:
        self.cluster, self.document, self.namespace = cluster, document, namespace
        self.name = str(document["metadata"]["name"])
        self._kube = Kube(cluster.kubeconfig)

    def read(self, path: str) -> dict[str, Any]:
        """Return an object or a list of its namespace.

        Args:
            path: API and collection, such as `/api/v1|pods`, with a name or a query.

        Raises:
            ClusterError: it does not exist, or the API server does not answer.
        """
        group, _, rest = path.partition("|")
        try:
            return self._kube("GET", f"{group}/namespaces/{self.namespace}/{rest}")
        except (OSError, http.client.HTTPException, AssertionError) as error:
            raise ClusterError(str(error)) from None

    def kubectl(self, *words: str, **options: Any) -> str:
        """Run kubectl in the run's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def apply(self) -> None:
        """`kubectl apply` of the manifest."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.document))

    def get(self) -> dict[str, Any]:
        """Return the whole object."""
        return self.read(f"/apis/rlrun.io/v1alpha1|rlruns/{self.name}")

    def status(self) -> dict[str, Any]:
        """Return its status, empty before the first one."""
        status: dict[str, Any] = self.get().get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """Return one condition, empty if it does not exist."""
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def step(self) -> int:
        """Return the last trained step in the progress Lease."""
        return int(self._renewal().get("rlrun.io/step", 0))

    def _renewal(self) -> dict[str, str]:
        """Return the annotations of the progress Lease."""
        lease = self.read(f"/apis/coordination.k8s.io/v1|leases/{self.name}-progress")
        found: dict[str, str] = lease["metadata"].get("annotations", {})
        return found

    def attempt(self) -> int:
        """Return the number of the current attempt."""
        return int(self.status().get("attempt", 0))

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """Return its pods, terminating ones included."""
        selector = f"rlrun.io/run={self.name}" + (f",rlrun.io/role={role}" if role else "")
        found: list[dict[str, Any]] = self.read(f"/api/v1|pods?labelSelector={selector}")["items"]
        return found

    def wait(self, what: str, holds: Callable[[], Any], *, steps: bool = False) -> Any:
        """Wait until `holds()` is true and return its value.

        Args:
            what: description of the awaited state.
            holds: the condition.
            steps: whether trained steps are progress.

        Raises:
            StalledError: no progress; the message has the output of describe and the reports of the pods.
        """
        wait = Wait(
            f"{self.name}: {what}",
            lambda: self._signs(steps),
            lambda: f"{self.describe_status()}\n{self.explain()}",
            LONG_POLL_SECONDS,
        )
        while True:
            with suppress(ClusterError):  # the API server may be stopped on purpose
                if value := holds():
                    return value
            wait.poll()
            time.sleep(LONG_POLL_SECONDS)
            wait.woke()

    def _signs(self, steps: bool) -> object:
        """Return marks of the work of operator and pods, without messages, because some of them count steps or seconds."""
        try:
            status = self.status()
            conditions = [(c["type"], c["status"], c["reason"]) for c in status.get("conditions", [])]
            pods = [pod["metadata"]["resourceVersion"] for pod in self.pods()]
            trained = (self.step(), self._renewal().get("rlrun.io/checkpoint-step")) if steps else ()
        except ClusterError as error:
            return str(error)
        return status.get("phase"), status.get("attempt"), status.get("reason"), conditions, pods, trained

    def wait_phase(self, phase: str) -> dict[str, Any]:
        """Wait for a phase; a Failed run ends the wait at once."""

        def reached() -> dict[str, Any] | None:
            status = self.status()
            if status.get("phase") == "Failed" and phase != "Failed":
                raise AssertionError(f"{self.name} is Failed: {status.get('message')}\n{self.explain()}")
            return status if status.get("phase") == phase else None

        found: dict[str, Any] = self.wait(f"phase {phase}", reached, steps=phase in ("Complete", "Failed"))
        return found

    def wait_step(self, step: int) -> None:
        """Wait until a step is trained."""
        self.wait(f"step {step}", lambda: self.step() >= step, steps=True)

    def wait_checkpoint(self, step: int) -> None:
        """Wait until a checkpoint of `step` or later is complete."""

        def reached() -> bool:
            return int(self._renewal().get("rlrun.io/checkpoint-step", 0)) >= step

        self.wait(f"checkpoint {step}", reached, steps=True)

    def kill_process(self, pod: str, container: str, words: str) -> None:
        """Kill the processes of a container whose command line contains `words`; its first process, the exit shim,
        survives."""
        killed = self.kubectl("exec", pod, "-c", container, "--", "python3", "-c", _KILL, words)
        assert int(killed) > 0, f"no process of {pod} has {words!r} in its command line"

    def wait_resource_version(self) -> str:
        """Return its resourceVersion after the last write: the operator still counts pods after it has reported an end."""
        seen: list[str] = []

        def look() -> str | None:
            seen.append(str(self.get()["metadata"]["resourceVersion"]))
            return seen[-1] if seen[-4:] == seen[-1:] * 4 else None

        found: str = self.wait("nothing changes in it by itself", look)
        return found

    def describe_status(self) -> str:
        """Return its status on one line, because a summary of tests shows only the first line."""
        try:
            status = self.status()
        except ClusterError as error:
            return str(error)
        said = (f"{c['type']}: {c['message']}" for c in status.get("conditions", []) if c["status"] != "True")
        return f"{status.get('phase')}, attempt {status.get('attempt')}; " + " | ".join(said)

    def explain(self) -> str:
        """Return everything that helps to explain a failed test."""
        parts = [
            self.kubectl("describe", "rlr", self.name, check=False),
            self.kubectl("get", "pods,sts,deploy,pvc", "-o", "wide", check=False),
        ]
        for pod in self.pods():
            for previous in ((), ("--previous",)):
                log = self.kubectl("logs", pod["metadata"]["name"], "--tail=15", *previous, check=False)
                parts.append(f"--- {pod['metadata']['name']} {' '.join(previous)}\n{log}")
        return "\n".join(parts)

    def identities(self) -> Mapping[str, str]:
        """Return UID and generation of every workload and pod; equal values before and after a fault prove that nothing
        was changed."""
        kinds = {
            "StatefulSet": "/apis/apps/v1|statefulsets",
            "Deployment": "/apis/apps/v1|deployments",
            "Pod": "/api/v1|pods",
        }
        selector = f"labelSelector=rlrun.io/run={self.name}"
        return {
            f"{kind}/{o['metadata']['name']}": f"{o['metadata']['uid']} {o['metadata'].get('generation')} "
            f"{sum(c.get('restartCount', 0) for c in o.get('status', {}).get('containerStatuses', []))}"
            for kind, path in kinds.items()
            for o in self.read(f"{path}?{selector}")["items"]
        }

    def delete(self) -> None:
        """Delete it and wait until its pods are gone."""
        self.kubectl("delete", "rlr", self.name, "--ignore-not-found", "--wait", timeout=120)
        self.wait("all pods gone", lambda: not self.pods())
