"""Prometheus metrics of a trainer's or engine's pod: use, memory and idle time of its GPUs.

Without the package nvidia-ml-py, a driver or a GPU, the pod has no GPU series and reports no error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from rlrun.runtime.metric_table import MetricSpec, MetricTable
from rlrun.runtime.nvml import IDLE_BELOW, SAMPLE_SECONDS, Gpus, Sample, gpus_here

_GPU = ("gpu",)
POD = MetricTable(
    MetricSpec(
        "rlrun_pod_start_timestamp_seconds",
        "gauge",
        "Start of the role's container, since the epoch",
        unit="timestamp",
    ),
    MetricSpec(
        "rlrun_gpu_utilization_ratio", "gauge", "Share of the last sample in which a kernel ran", _GPU, unit="ratio"
    ),
    MetricSpec("rlrun_gpu_memory_used_bytes", "gauge", "Used memory of the GPU, by all processes", _GPU, "bytes"),
    MetricSpec("rlrun_gpu_memory_size_bytes", "gauge", "Memory of the GPU", _GPU, "bytes"),
    MetricSpec(
        "rlrun_gpu_idle_seconds_total", "counter", "Time in which the GPU computed almost nothing", _GPU, "seconds"
    ),
)
"""Metrics of a trainer or engine pod; run, role and attempt are labels of the scraped pod."""


class PodMetrics:
    """Metrics of this pod, sampled in a thread until `close`.

    Args:
        gpus: factory of the source of samples; called in the thread, because a driver may take seconds to answer.
        clock: steady seconds.
    """

    def __init__(
        self, gpus: Callable[[], Gpus | None] = gpus_here, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._began, self._closed = clock, time.time(), threading.Event()
        self._samples: Sequence[Sample] = ()
        self._idle: dict[int, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        threading.Thread(target=self._sample_gpus, args=(gpus,), name="gpus", daemon=True).start()

    def _sample_gpus(self, gpus: Callable[[], Gpus | None]) -> None:
        source = gpus()
        before = self._clock()
        while source is not None and not self._closed.wait(SAMPLE_SECONDS):
            with suppress(Exception):  # a broken driver costs only the metrics
                samples, now = source.sample_gpus(), self._clock()
                self.record_sample(samples, now - before)
                before = now

    def record_sample(self, samples: Sequence[Sample], seconds: float) -> None:
        """Record a sample.

        Args:
            samples: sample of each GPU.
            seconds: seconds since the previous sample.
        """
        idle = dict(self._idle)
        for gpu, sample in enumerate(samples):
            if sample.utilization is not None:
                idle[gpu] = idle.get(gpu, 0.0) + (seconds if sample.utilization < IDLE_BELOW else 0.0)
        self._samples, self._idle = samples, idle

    def text(self) -> bytes:
        """Return the metrics as Prometheus text."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()

    def describe(self) -> Sequence[Metric]:
        """Return no descriptions: the names are those of `POD`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all series for a registry."""
        families = {spec.name: POD.make_family(spec.name) for spec in POD}
        families["rlrun_pod_start_timestamp_seconds"].add_metric([], self._began)
        for gpu, sample in enumerate(self._samples):
            label = [str(gpu)]
            if sample.utilization is not None:
                families["rlrun_gpu_utilization_ratio"].add_metric(label, sample.utilization)
            families["rlrun_gpu_memory_used_bytes"].add_metric(label, sample.used_bytes)
            families["rlrun_gpu_memory_size_bytes"].add_metric(label, sample.size_bytes)
        for gpu, seconds in self._idle.items():
            families["rlrun_gpu_idle_seconds_total"].add_metric([str(gpu)], seconds)
        yield from families.values()
