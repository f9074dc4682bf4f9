"""Time from `kubectl apply` to the first completed step, by phase, with the operator's share.

    python -m benchmarks.apply_to_first_step [--stub] [--repeat N] [--write]

The operator's part is taken from the API server's audit log, in microseconds: from the RLRun's creation to the last
object that its pods need. The pods' part has Kubernetes' resolution of a second. `--stub` measures the product's own
waits without torch and vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, api, deploy
from tests.cluster.images import build
from tests.e2e.cluster.kube_run import KubeRun, example

RESULT = Path(__file__).parent / "results" / "apply_to_first_step.md"
NAMESPACE = "default"
NEEDED = {
    "configmaps", "secrets", "serviceaccounts", "roles", "rolebindings", "services", "leases", "networkpolicies",
    "persistentvolumeclaims", "statefulsets", "deployments", "pods",
}  # fmt: skip


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def audited(log: Path, since: float) -> Iterable[Mapping[str, Any]]:
    """Return writes that the API server has answered since a moment, in order."""
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if _time(entry["stageTimestamp"]) >= since:
            yield entry


def operator_seconds(entries: Iterable[Mapping[str, Any]], run: str) -> float:
    """Return the time from the RLRun's creation to the answer to the last object that its pods need."""
    created, last = None, None
    for entry in entries:
        reference = entry.get("objectRef", {})
        if "dryRun" in entry.get("requestURI", ""):
            continue
        if reference.get("resource") == "rlruns" and not reference.get("subresource") and created is None:
            created = _time(entry["requestReceivedTimestamp"])
        user = entry["user"]["username"]
        name = str(reference.get("name", ""))
        if user.endswith(f":{deploy.RELEASE}") and reference.get("resource") in NEEDED and name.startswith(run):
            last = _time(entry["stageTimestamp"])
    if created is None or last is None:
        raise ValueError(f"the audit log does not show how {run} was created")
    return last - created


def measure(cluster: Cluster, document: dict[str, Any]) -> dict[str, float]:
    """Return seconds from `kubectl apply` to each milestone of one run, which is deleted afterwards."""
    run = KubeRun(cluster, document, NAMESPACE)
    since = time.time()
    run.apply()
    applied = _time(run.get()["metadata"]["creationTimestamp"])
    run.wait("the first step", lambda: run.step() >= 1, steps=True)
    reported = run.wait("Running", lambda: run.status().get("phase") == "Running" and time.time())
    claim = json.loads(run.kubectl("get", "pvc", f"{run.name}-data", "-o", "json"))
    volume = json.loads(cluster.kubectl("get", "pv", claim["spec"]["volumeName"], "-o", "json"))
    metrics = f"{volume['spec']['hostPath']['path']}/{run.name}/metrics.jsonl"
    lines = [json.loads(line) for line in cluster.sh(cluster.nodes[0], "cat", metrics).splitlines()]
    first = next(line["time"] for line in lines if line["step"] == 1)
    found = {
        "operator: all objects applied": operator_seconds(audited(cluster.audit_log, since - 1), run.name),
        "first step done": first - since,
        "status says Running": reported - since,
    }
    for role in ("trainer", "inference", "orchestrator"):
        pod = run.pods(role)[0]
        conditions = {c["type"]: c for c in pod["status"]["conditions"] if c["status"] == "True"}
        found[f"{role}: scheduled"] = _time(conditions["PodScheduled"]["lastTransitionTime"]) - applied
        for state in pod["status"].get("initContainerStatuses", []):
            ended = state["state"].get("terminated")
            if ended:
                found[f"{role}: model made"] = _time(ended["finishedAt"]) - applied
        running = pod["status"]["containerStatuses"][0]["state"].get("running")
        if running:
            found[f"{role}: container started"] = _time(running["startedAt"]) - applied
        if "Ready" in conditions:
            found[f"{role}: ready"] = _time(conditions["Ready"]["lastTransitionTime"]) - applied
    run.delete()
    run.kubectl("delete", "pvc", f"{run.name}-data", "--wait", timeout=60)
    return found


def table(samples: Sequence[Mapping[str, float]], title: str) -> str:
    """Return the median of each milestone, in order of time."""
    names = sorted(samples[0], key=lambda name: statistics.median(s[name] for s in samples if name in s))
    rows = [f"| {name} | {statistics.median(s[name] for s in samples if name in s):.1f} |" for name in names]
    return "\n".join(
        [
            f"{title}, median of {len(samples)}, seconds after `kubectl apply`:",
            "",
            "| milestone | s |",
            "|---|---:|",
            *rows,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on a separate cluster; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apply_to_first_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--stub", action="store_true", help="stub images: only the product's own waits")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"add the table to {RESULT.name}")
    arguments = parser.parse_args(argv)
    built = build(["operator", "stub"] if arguments.stub else ["operator", "trainer", "inference"])
    references = {name: image.reference for name, image in built.items()}
    if arguments.stub:
        references |= {"trainer": references["stub"], "inference": references["stub"]}
    document = example("quickstart", maxSteps=1000)
    with api.up("bench", nodes=2, images=[image.archive for image in built.values()], tie=True) as cluster:
        deploy.install(cluster, references)
        samples = [measure(cluster, document) for _ in range(arguments.repeat)]
    text = table(samples, "Stub images" if arguments.stub else "Real images (tiny model, CPU, 2 cores)")
    print(text)
    if arguments.write:
        RESULT.parent.mkdir(exist_ok=True)
        before = RESULT.read_text() if RESULT.exists() else "# From apply to the first step\n"
        RESULT.write_text(f"{before}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
