"""Follows one run with kubectl until it ends, as a user would."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cluster.api import Cluster

POLL_SECONDS = 2.0
_REWARD = re.compile(r"step (\d+): reward ([0-9.]+)")
_HELD_OUT = re.compile(r"step (\d+): .*held-out \S+ ([0-9.]+)")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    phase: str
    seconds: float
    rewards: tuple[float, ...]
    """Mean reward of each step, in order."""
    held_out: tuple[tuple[int, float], ...]
    """Pairs of policy version and held-out reward."""
    status: dict[str, Any]

    @property
    def start(self) -> float:
        """Mean reward of the first five steps."""
        return _mean(self.rewards[:5])

    @property
    def end(self) -> float:
        """Lowest mean of ten consecutive steps in the last third, which is a reward that was reached and kept."""
        last = self.rewards[-(len(self.rewards) // 3) :]
        return min(_mean(last[i : i + 10]) for i in range(0, len(last) - 9, 10))


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else float("nan")


def get(cluster: Cluster, name: str, namespace: str = "default") -> dict[str, Any]:
    """Return the run's object from the API server."""
    found: dict[str, Any] = json.loads(cluster.kubectl("get", "rlrun", name, "-n", namespace, "-o", "json"))
    return found


def follow(
    cluster: Cluster, name: str, *, namespace: str = "default", timeout: float, show: Callable[[str], None] = print
) -> Outcome:
    """Print the output of `kubectl get rlr` at each change until the run is Complete or Failed.

    Raises:
        TimeoutError: it did not end in time; the message has the output of describe.
    """
    began, shown = time.monotonic(), ""
    while True:
        table = cluster.kubectl("get", "rlr", name, "-n", namespace).splitlines()
        line = table[-1].rsplit(None, 1)[0]  # without the age
        if line != shown:
            if not shown:
                show(f"{'':8}{table[0]}")
            show(f"{time.monotonic() - began:6.0f}s {table[-1]}")
            shown = line
        status = get(cluster, name, namespace).get("status", {})
        if status.get("phase") in ("Complete", "Failed"):
            return outcome(cluster, name, namespace, time.monotonic() - began)
        if time.monotonic() - began > timeout:
            description = cluster.kubectl("describe", "rlr", name, "-n", namespace)
            raise TimeoutError(f"{name} did not end within {timeout:.0f} s:\n{description}")
        time.sleep(POLL_SECONDS)


def outcome(cluster: Cluster, name: str, namespace: str, seconds: float) -> Outcome:
    """Return the run's result from its status and the log of its last orchestrator."""
    status = get(cluster, name, namespace).get("status", {})
    pods = cluster.kubectl(
        "get", "pods", "-n", namespace, "-l", f"rlrun.io/run={name},rlrun.io/role=orchestrator", "-o", "name"
    )
    log = "".join(cluster.kubectl("logs", "-n", namespace, pod, check=False) for pod in pods.split())
    rewards = {int(step): float(reward) for step, reward in _REWARD.findall(log)}
    held_out = {int(step): float(reward) for step, reward in _HELD_OUT.findall(log)}
    return Outcome(
        phase=str(status.get("phase")),
        seconds=seconds,
        rewards=tuple(rewards[step] for step in sorted(rewards)),
        held_out=tuple(sorted(held_out.items())),
        status=status,
    )
