"""The metrics page lists exactly the metrics of the code, and names follow the rules."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlrun.orchestrator.progress.exposition import (
    ORCHESTRATOR,
    EngineLook,
    Measures,
    StepTotals,
    metrics_text,
)
from rlrun.orchestrator.progress.progress_server import Progress
from rlrun.pod.gpu_metrics import POD, PodMetrics
from rlrun.runtime.metric_table import MetricSpec
from rlrun.runtime.nvml import Sample, gpus_here
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.metrics import OPERATOR, Metrics
from tools.docs_metrics import TABLES, metrics_page, shared

ROOT = Path(__file__).parents[3]
MAKERS = {"Gauge", "Counter", "Histogram", "Summary", "Info", "Enum", "GaugeMetricFamily", "CounterMetricFamily"}
FULL = Progress(
    step=3,
    max_steps=10,
    policy_version=3,
    checkpoint_step=2,
    resumed_from_step=None,
    reward=0.5,
    eval={"arithmetic": 0.4},
    tokens_per_second=100.0,
    staleness_mean=1.5,
    waiting_on="",
    eta_seconds=60.0,
    in_flight=4,
    errors=1,
    waiting_role="orchestrator",
    engine_load={"waited": 0.1, "idle": 0.2},
)
STEP = {
    "loss": 0.1,
    "grad_norm": 1.0,
    "lr": 1e-6,
    "entropy": 0.3,
    "mismatch_kl": 1e-4,
    "completion_length/mean": 20.0,
    "batch/truncated": 0.1,
    "batch/solve_none": 0.2,
    "perf/mfu": 0.4,
    "reward/mean": 0.5,
    "reward/arithmetic/mean": 0.5,
}


def names(text: bytes) -> set[str]:
    """Return the metric names of a scrape, with one name for all series of a metric."""
    found = set()
    for family in text_string_to_metric_families(text.decode()):
        if family.samples and not family.name.endswith("_created"):
            found.add(family.name + ("_total" if family.type == "counter" else ""))
    return found


def specs() -> list[MetricSpec]:
    return [spec for _, table in TABLES.values() for spec in table]


def test_metrics_page_lists_metrics_of_all_programs() -> None:
    rows = re.findall(r"^\| `(rlrun_\w+)`", metrics_page(), re.M)
    assert Counter(rows) == Counter(spec.name for spec in specs())


def test_metrics_are_made_only_from_tables() -> None:
    """A metric with its own name would be missing on the page."""
    past = []
    for file in sorted([*(ROOT / "workloads").rglob("*.py"), *(ROOT / "operator").rglob("*.py")]):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            maker = getattr(call.func, "id", getattr(call.func, "attr", ""))
            first = call.args[0]
            if maker in MAKERS and isinstance(first, ast.Constant | ast.JoinedStr):
                past.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert past == []


def test_names_units_and_labels_follow_the_rules() -> None:
    for spec in specs():
        assert re.fullmatch(r"rlrun(_[a-z]+)+", spec.name), spec
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec
        stem = spec.name.removesuffix("_total")
        if spec.unit in ("seconds", "bytes", "ratio"):
            assert stem.endswith(f"_{spec.unit}"), spec
        if spec.unit == "timestamp":
            assert stem.endswith("_timestamp_seconds"), spec
        assert not re.search(r"_(ms|millis|milliseconds|minutes|percent|mib|gib|kb|mb|gb)(_|$)", spec.name), spec
        assert spec.text
        assert "\n" not in spec.text


def test_metric_name_has_one_meaning() -> None:
    """Operator and orchestrator share three metrics; one kind of program exports each other metric."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    for spec in specs():
        meanings.setdefault(spec.name, set()).add((spec.text, spec.kind))
    assert {name for name, found in meanings.items() if len(found) > 1} == set()
    twice = [name for name, count in Counter(spec.name for spec in specs()).items() if count > 1]
    assert sorted(twice) == shared() == ["rlrun_max_steps", "rlrun_reward_mean", "rlrun_step"]


def test_orchestrator_exports_all_metrics_of_its_table() -> None:
    totals = StepTotals()
    totals.trained({"time/step": 10.0, "time/wait_for_batch": 4.0})
    engines = [EngineLook("serving", 3, 1, 0.5), EngineLook("out", None, None, None)]
    text = metrics_text(FULL, Measures(STEP, totals, engines, (10, 100)), "StorageFull")
    assert names(text) == {spec.name for spec in ORCHESTRATOR}
    for line in (
        b"rlrun_trainer_wait_seconds_total 4.0",
        b'rlrun_waiting{on="orchestrator"} 1.0',
        b'rlrun_waiting{on="trainer"} 0.0',
        b'rlrun_engines{state="out"} 1.0',
        b'rlrun_engine_requests{state="running"} 3.0',
        b'rlrun_engine_load{measure="idle"} 0.2',
        b'rlrun_environment_reward_mean{environment="arithmetic"} 0.5',
        b"rlrun_volume_free_bytes 10.0",
        b'rlrun_volume_trouble{reason="StorageFull"} 1.0',
        b"rlrun_rollout_errors_total 1.0",
    ):
        assert line in text, (line, text)


def test_unknown_values_have_no_series() -> None:
    text = metrics_text(Progress(**{**vars(FULL), "step": None, "reward": None, "eval": {}}), Measures())
    assert {"rlrun_step", "rlrun_reward_mean", "rlrun_loss", "rlrun_engines", "rlrun_volume_free_bytes"} & names(
        text
    ) == set()
    assert b"rlrun_max_steps 10.0" in text


def test_environments_have_a_bounded_number_of_series() -> None:
    many = {f"reward/e{number}/mean": 0.5 for number in range(1000)}
    text = metrics_text(Progress(**{**vars(FULL), "eval": many}), Measures(many))
    assert text.count(b"rlrun_environment_reward_mean{") == text.count(b"rlrun_eval_reward_mean{") == 64


def test_pod_counts_idle_time_per_gpu() -> None:
    pod = PodMetrics(lambda: None)
    pod.record_sample([Sample(0.0, 5, 80), Sample(0.9, 70, 80), Sample(None, 1, 10)], 2.0)
    pod.record_sample([Sample(0.04, 5, 80), Sample(0.0, 70, 80), Sample(None, 1, 10)], 2.0)
    text = pod.text()
    assert names(text) == {spec.name for spec in POD}
    for line in (
        b'rlrun_gpu_idle_seconds_total{gpu="0"} 4.0',
        b'rlrun_gpu_idle_seconds_total{gpu="1"} 2.0',
        b'rlrun_gpu_memory_used_bytes{gpu="1"} 70.0',
        b'rlrun_gpu_utilization_ratio{gpu="0"} 0.04',
    ):
        assert line in text
    assert b'utilization_ratio{gpu="2"}' not in text, "a slice of a GPU does not say"
    pod.close()


def test_pod_without_gpus_has_no_gpu_series() -> None:
    pod = PodMetrics(lambda: None)
    assert names(pod.text()) == {"rlrun_pod_start_timestamp_seconds"}
    pod.close()


def test_operator_metrics_equal_its_table() -> None:
    registry = Metrics(Store()).registry
    declared = {
        line.split()[2] for line in generate_latest(registry).decode().splitlines() if line.startswith("# TYPE rlrun_")
    }
    own = {spec.name for spec in OPERATOR}
    assert {name for name in declared if not name.endswith("_created")} - own == {
        spec.name for _, table in [next(iter(TABLES.values()))] for spec in table
    }
    assert own <= declared


class Nvml:
    """Fake nvidia-ml-py with two GPUs: a whole one, and a slice that does not report its use."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        self._driver = driver

    def nvmlInit(self) -> None:
        if not self._driver:
            raise self.NVMLError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=handle + 1, total=80)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=45, memory=3)


def test_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    found = gpus_here()
    assert found is not None
    assert list(found.sample_gpus()) == [Sample(0.45, 1, 80), Sample(None, 2, 80)]


@pytest.mark.parametrize("module", [None, Nvml(driver=False)], ids=["no package", "no driver"])
def test_missing_nvml_means_no_gpus(monkeypatch: pytest.MonkeyPatch, module: Nvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpus_here() is None
