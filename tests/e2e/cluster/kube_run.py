"""One RLRun on a cluster under test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster, ClusterError

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
POLL_SECONDS = 0.5


def example(name: str, **spec: Any) -> dict[str, Any]:
    """A manifest of `examples/`, some of its top-level spec fields merged one level deep."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    for key, value in spec.items():
        old = document["spec"].get(key)
        document["spec"][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return document


class KubeRun:
    """A run by its name; everything goes through kubectl, as a user's does."""

    def __init__(self, cluster: Cluster, document: dict[str, Any], namespace: str) -> None:
        self.cluster, self.document, self.namespace = cluster, document, namespace
        self.name = str(document["metadata"]["name"])

    def kubectl(self, *words: str, **options: Any) -> str:
        """kubectl in the run's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def apply(self) -> None:
        """`kubectl apply` of the manifest."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.document))

    def get(self) -> dict[str, Any]:
        """The whole object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "rlrun", self.name, "-o", "json"))
        return found

    def status(self) -> dict[str, Any]:
        """Its status; empty before the first one."""
        status: dict[str, Any] = self.get().get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition; empty when it is not there."""
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def step(self) -> int:
        """Last trained step that the progress Lease tells."""
        lease = json.loads(self.kubectl("get", "lease", f"{self.name}-progress", "-o", "json"))
        return int(lease["metadata"].get("annotations", {}).get("rlrun.io/step", 0))

    def attempt(self) -> int:
        """Number of the current attempt."""
        return int(self.status().get("attempt", 0))

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """Its pods, ending ones included."""
        selector = f"rlrun.io/run={self.name}" + (f",rlrun.io/role={role}" if role else "")
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return found

    def wait(self, what: str, holds: Callable[[], Any], timeout: float = 120.0) -> Any:
        """Wait until `holds()` is true and return it; fails with everything that describe and the pods say."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if value := holds():
                    return value
            except ClusterError as error:  # the API server may be down on purpose
                last: Exception | None = error
            else:
                last = None
            if time.monotonic() > deadline:
                seen = f"{self.told()}{f'; {last}' if last else ''}"
                raise AssertionError(f"{self.name}: not within {timeout:.0f} s: {what} ({seen})\n{self.explain()}")
            time.sleep(POLL_SECONDS)

    def wait_phase(self, phase: str, timeout: float = 180.0) -> dict[str, Any]:
        """Wait for a phase; a Failed run ends the wait at once."""

        def reached() -> dict[str, Any] | None:
            status = self.status()
            if status.get("phase") == "Failed" and phase != "Failed":
                raise AssertionError(f"{self.name} is Failed: {status.get('message')}\n{self.explain()}")
            return status if status.get("phase") == phase else None

        found: dict[str, Any] = self.wait(f"phase {phase}", reached, timeout)
        return found

    def wait_step(self, step: int, timeout: float = 180.0) -> None:
        """Wait until a step is trained."""
        self.wait(f"step {step}", lambda: self.step() >= step, timeout)

    def wait_checkpoint(self, step: int, timeout: float = 180.0) -> None:
        """Wait until a checkpoint of `step` or later is complete."""

        def reached() -> bool:
            lease = json.loads(self.kubectl("get", "lease", f"{self.name}-progress", "-o", "json"))
            return int(lease["metadata"].get("annotations", {}).get("rlrun.io/checkpoint-step", 0)) >= step

        self.wait(f"checkpoint {step}", reached, timeout)

    def kill_process(self, pod: str, container: str, words: str) -> None:
        """SIGKILL the processes of a container whose command line holds `words`; its first process, the exit shim, lives on."""
        killed = self.kubectl("exec", pod, "-c", container, "--", "python3", "-c", _KILL, words)
        assert int(killed) > 0, f"no process of {pod} has {words!r} in its command line"

    def rests(self) -> str:
        """Its resourceVersion, once nothing writes to it any more: the operator counts pods after it has told of an end."""
        seen: list[str] = []

        def look() -> str | None:
            seen.append(str(self.get()["metadata"]["resourceVersion"]))
            return seen[-1] if seen[-4:] == seen[-1:] * 4 else None

        found: str = self.wait("nothing changes in it by itself", look)
        return found

    def told(self) -> str:
        """What its status says, on one line: a summary of tests shows only the first."""
        try:
            status = self.status()
        except ClusterError as error:
            return str(error)
        said = (f"{c['type']}: {c['message']}" for c in status.get("conditions", []) if c["status"] != "True")
        return f"{status.get('phase')}, attempt {status.get('attempt')}; " + " | ".join(said)

    def explain(self) -> str:
        """All that helps to see why a test failed."""
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
        """Uid and generation of every workload and pod: equal before and after means that nobody touched them."""
        objects = json.loads(self.kubectl("get", "sts,deploy,pods", "-l", f"rlrun.io/run={self.name}", "-o", "json"))[
            "items"
        ]
        return {
            f"{o['kind']}/{o['metadata']['name']}": f"{o['metadata']['uid']} {o['metadata'].get('generation')} "
            f"{sum(c.get('restartCount', 0) for c in o.get('status', {}).get('containerStatuses', []))}"
            for o in objects
        }

    def delete(self) -> None:
        """Delete it and wait until its pods are gone."""
        self.kubectl("delete", "rlr", self.name, "--ignore-not-found", "--wait", timeout=120)
        self.wait("all pods gone", lambda: not self.pods(), 120)
