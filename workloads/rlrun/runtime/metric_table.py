"""Table of a program's Prometheus metrics: name, type, labels, unit and meaning. Series can only be created from the table.

The page of all metrics is generated from the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Kind = Literal["gauge", "counter", "histogram"]
Unit = Literal["", "seconds", "bytes", "ratio", "tokens", "timestamp"]
Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: name as scraped; a counter's name ends in `_total`.
        kind: type of the metric.
        text: meaning, on one line.
        labels: labels of the metric, in addition to those of the scraped pod.
        unit: unit of its values; "" for counts, indices and flags.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    unit: Unit = ""

    @property
    def base_name(self) -> str:
        """Name for prometheus_client, without a counter's suffix."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


class MetricTable:
    """All metrics of one program.

    Args:
        specs: specifications of the metrics.

    Raises:
        ValueError: a name occurs twice.
    """

    def __init__(self, *specs: MetricSpec) -> None:
        self._specs: Mapping[str, MetricSpec] = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("a metric is declared twice")

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __getitem__(self, name: str) -> MetricSpec:
        return self._specs[name]

    def make_family(self, name: str) -> Family:
        """Return an empty family of the metric `name`, a gauge or a counter; `add_metric` fills it."""
        spec = self._specs[name]
        family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        return family(spec.base_name, spec.text, labels=spec.labels)

    def metric_arguments(self, name: str) -> tuple[str, str, Sequence[str]]:
        """Return name, meaning and labels for the constructors of prometheus_client's own metrics."""
        spec = self._specs[name]
        return spec.base_name, spec.text, spec.labels
