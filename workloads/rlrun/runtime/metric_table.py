"""A program's Prometheus metrics, each declared once: name, type, labels, unit and meaning. Series are made from the table alone.

The page of all metrics is generated from the tables, and a family that no table has cannot be made.
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
        name: as it is scraped: a counter's ends in `_total`.
        kind: its type.
        text: its meaning, on one line.
        labels: its own; those of the scraped pod come on top.
        unit: of its values; "" where they are counts, indices or flags.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    unit: Unit = ""

    @property
    def base(self) -> str:
        """Name as prometheus_client takes it: without a counter's suffix."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


class MetricTable:
    """All metrics of one program.

    Args:
        specs: each metric once.

    Raises:
        ValueError: a name is there twice.
    """

    def __init__(self, *specs: MetricSpec) -> None:
        self._specs: Mapping[str, MetricSpec] = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError("a metric is declared twice")

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __getitem__(self, name: str) -> MetricSpec:
        return self._specs[name]

    def family(self, name: str) -> Family:
        """An empty family of the metric `name`, a gauge or a counter; `add_metric` fills it."""
        spec = self._specs[name]
        made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        return made(spec.base, spec.text, labels=spec.labels)

    def arguments(self, name: str) -> tuple[str, str, Sequence[str]]:
        """Name, meaning and labels as the constructors of prometheus_client's own metrics take them."""
        spec = self._specs[name]
        return spec.base, spec.text, spec.labels
