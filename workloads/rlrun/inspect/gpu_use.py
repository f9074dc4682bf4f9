"""GPU use of a run, measured by NVML: from the launcher's record on this machine, from the pods in a cluster.

The pods' values are their metrics. They are read inside the pods with `kubectl exec`, because network policies allow only scrapers to
reach the metrics port. A few pods per role represent all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rlrun.inspect.kubectl import Api, ClusterError
from rlrun.inspect.snapshot import Process, Snapshot
from rlrun.protocol.files.launcher_record import GpuUse, mean_share, read_record, read_use
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages.endpoints import POD_METRICS, POD_PORT
from rlrun.runtime.printable import escape_controls

PODS_PER_ROLE = 3
"""Number of pods per role that are read; each needs its own kubectl process."""
NVML_SECONDS = 15.0
"""Time in seconds until a launcher has measured its GPUs for the first time."""
_UNKNOWN = "not measured: the driver's NVML, or the package nvidia-ml-py, is missing"
_SECONDS = 8.0
_READ = (
    "import http.client as h,os;"
    f"c=h.HTTPConnection(os.environ.get('RLRUN_POD_IP') or '127.0.0.1',{POD_PORT},timeout=5);"
    f"c.request('GET','{POD_METRICS}');print(c.getresponse().read().decode())"
)
_SERIES = re.compile(r'^(rlrun_(?:gpu|pod)_\w+)(?:\{gpu="(\d+)"\})? (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class _Pod:
    """GPU metrics of one pod, by metric and GPU."""

    series: Mapping[str, Mapping[str, float]]
    seconds: float
    """Seconds since the start of the pod's role."""

    def metric_values(self, metric: str) -> list[float]:
        return list(self.series.get(metric, {}).values())


def with_gpus(seen: Snapshot, api: Api, now: float) -> Snapshot:
    """Return `seen` with its GPU use, or with the reason if it is unknown. A run that is not active has no GPU use."""
    return _of_folder(seen, now) if seen.place == "folder" else _of_pods(seen, api, now)


def _of_folder(seen: Snapshot, now: float) -> Snapshot:
    record = read_record(RunPaths(Path(seen.where)).launcher)
    if record is None or not record.alive(now):
        return seen
    uses = [(escape_controls(role), use) for role, one in record.gpu_use.items() if (use := read_use(one)) is not None]
    late = record.time - record.began > NVML_SECONDS and any(record.gpus.values())
    return replace(seen, gpus=tuple(uses), gpus_unknown=f"{_UNKNOWN} here" if late and not uses else None)


def _of_pods(seen: Snapshot, api: Api, now: float) -> Snapshot:
    attempts = (None, seen.attempt)
    running = [one for one in seen.processes if one.gpus and one.state == "Running" and one.attempt in attempts]
    if not running:
        return seen
    roles = {role: [one for one in running if one.role == role] for role in dict.fromkeys(one.role for one in running)}
    asked = [one for pods in roles.values() for one in pods[:PODS_PER_ROLE]]
    found: dict[str, _Pod] = {}
    refused = ""
    with ThreadPoolExecutor(len(asked)) as pool:
        for one, answer in [(one, pool.submit(_ask_pod, api, seen.where, one)) for one in asked]:
            try:
                found[one.name] = parse_use(answer.result(), now)
            except ClusterError as error:
                refused = refused or str(error)
    uses = [(role, use) for role, pods in roles.items() if (use := _sum_use(pods, found)) is not None]
    if uses:
        return replace(seen, gpus=tuple(uses))
    return replace(seen, gpus_unknown=f"not read in the pods: {refused}" if refused else f"{_UNKNOWN} in the pods")


def _ask_pod(api: Api, namespace: str, pod: Process) -> str:
    words = ["exec", pod.name, "--namespace", namespace, "-c", pod.role, "--", "python3", "-I", "-c", _READ]
    return api.read_output(words, timeout=_SECONDS)


def parse_use(text: str, now: float) -> _Pod:
    """Parse the GPU metrics of a pod; values that are not numbers are skipped.

    Args:
        text: Prometheus text.
        now: seconds since the epoch.
    """
    series: dict[str, dict[str, float]] = {}
    began = now
    for name, gpu, word in _SERIES.findall(text):
        try:
            value = float(word)
        except ValueError:
            continue
        if not 0 <= value < 2**60:
            continue
        if name == "rlrun_pod_start_timestamp_seconds":
            began = value
        elif gpu:
            series.setdefault(name, {})[gpu] = value
    return _Pod(series, max(0.0, now - began))


def _sum_use(pods: Sequence[Process], found: Mapping[str, _Pod]) -> GpuUse | None:
    """Return the sum over a role's pods, or None if no pod reported a measurement."""
    seen = [found[one.name] for one in pods if one.name in found]
    used, size = (
        [v for pod in seen for v in pod.metric_values(f"rlrun_gpu_memory_{what}_bytes")] for what in ("used", "size")
    )
    if not size:
        return None
    idle = [
        min(1.0, seconds / pod.seconds)
        for pod in seen
        for seconds in pod.metric_values("rlrun_gpu_idle_seconds_total")
        if pod.seconds
    ]
    shares = [share for pod in seen for share in pod.metric_values("rlrun_gpu_utilization_ratio")]
    return GpuUse(
        len(size),
        mean_share(shares),
        int(sum(used)),
        int(sum(size)),
        mean_share(idle),
        of=max(len(size), sum(one.gpus for one in pods)),
    )
