"""GPU use in `rlrun status`, from launcher records and from pods."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.main import main
from rlrun.inspect.gpu_use import NVML_SECONDS, PODS_PER_ROLE
from rlrun.inspect.kubectl import Answer
from rlrun.local.gpus import GpuMeter
from rlrun.protocol.files.launcher_record import LauncherRecord, new_record, write_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.nvml import Sample
from tests.unit.inspect.recorded import Recorded, Use, of_run, pod

GIB = 2**30
RUN: dict[str, Any] = {
    "metadata": {"name": "a", "namespace": "team"},
    "spec": {"maxSteps": 10},
    "status": {"phase": "Running", "attempt": 1, "conditions": []},
}


def metrics(began: float, use: Sequence[tuple[float | None, int, int, float]]) -> str:
    """Build the Prometheus text of a pod with these GPU shares, used bytes, total bytes and idle seconds."""
    lines = ["# HELP rlrun_gpu_utilization_ratio x", f"rlrun_pod_start_timestamp_seconds {began}"]
    for gpu, (share, used, size, idle) in enumerate(use):
        lines += [f'rlrun_gpu_utilization_ratio{{gpu="{gpu}"}} {share}'] if share is not None else []
        lines += [f'rlrun_gpu_memory_used_bytes{{gpu="{gpu}"}} {float(used)}']
        lines += [f'rlrun_gpu_memory_size_bytes{{gpu="{gpu}"}} {float(size)}']
        lines += [f'rlrun_gpu_idle_seconds_total{{gpu="{gpu}"}} {idle}'] if share is not None else []
    return "\n".join([*lines, "rlrun_gpu_utilization_ratio NaN", ""])


def gpu_pod(name: str, role: str, gpus: int, **container: Any) -> dict[str, Any]:
    found = pod(name, role, **container)
    found["spec"]["containers"] = [{"name": role, "resources": {"limits": {"nvidia.com/gpu": str(gpus), "cpu": "4"}}}]
    return found


def use_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("GPU use")), len(lines))
    return [" ".join(line.split()) for line in lines[first:] if line.startswith(("GPU use", " " * 12))][:2]


def test_pod_gpu_use_comes_from_its_metrics(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time() - 1000
    pods = [gpu_pod(f"a-trainer-{i}", "trainer", 2) for i in range(PODS_PER_ROLE + 1)]
    pods += [
        gpu_pod("a-inference-x", "inference", 1),
        gpu_pod("a-inference-y", "inference", 1, state={"waiting": {"reason": "X"}}),
    ]
    trainer = metrics(began, [(1.0, 60 * GIB, 80 * GIB, 0.0), (0.5, 40 * GIB, 80 * GIB, 500.0)])
    cluster = of_run(
        RUN,
        ("exec a-trainer-1", Answer(1, "", "error: unable to upgrade connection")),
        ("exec a-trainer", trainer),
        ("exec a-inference-x", metrics(began, [(None, GIB, 10 * GIB, 0.0)])),
        pods=pods,
    )
    use(cluster)
    assert main(["status", "a"]) == 0
    assert use_lines(capsys) == [
        "GPU use trainer: 4 GPUs of 8, 75% busy, 200.0 of 320.0 GiB, idle for 25% of the attempt",
        "inference: 1 GPU, a share of a GPU, whose use is not measured, 1.0 of 10.0 GiB",
    ]
    assert sum("exec" in asked for asked in cluster.asked) == PODS_PER_ROLE + 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            Answer(1, "", 'Error from server (Forbidden): pods "a-trainer-0" is forbidden'),
            "GPU use not read in the pods: ",
        ),
        (
            "rlrun_pod_start_timestamp_seconds 1\n",
            "GPU use not measured: the driver's NVML, or the package nvidia-ml-py, is",
        ),
    ],
)
def test_unknown_gpu_use_is_explained(
    use: Use, capsys: pytest.CaptureFixture[str], answer: Answer | str, told: str
) -> None:
    use(of_run(RUN, ("exec a-trainer-0", answer), pods=[gpu_pod("a-trainer-0", "trainer", 8)]))
    assert main(["status", "a"]) == 0
    assert use_lines(capsys)[0].startswith(told)


def test_pods_without_gpus_are_not_queried(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    cluster: Recorded = use(of_run(RUN, pods=[pod("a-trainer-0", "trainer")]))
    assert main(["status", "a"]) == 0
    assert (use_lines(capsys), any("exec" in asked for asked in cluster.asked)) == ([], False)


def a_folder(root: Path, record: LauncherRecord) -> Path:
    paths = RunPaths(root)
    root.mkdir(exist_ok=True)
    paths.run_json.write_text(json.dumps({"trainer": {"name": "a", "max_steps": 10}}))
    write_record(paths.launcher, record)
    return root


def test_folder_gpu_use_comes_from_launcher_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meter = GpuMeter({}, lambda ids: None)
    for shares in ((0.0, 0.9), (0.0, 0.7)):
        meter.add_samples({"trainer": [Sample(share, GIB, 4 * GIB) for share in shares], "inference": []}, 2.0)
    record = replace(new_record("a", 1, "again", {"trainer": 2}), gpu_use=meter.document())
    root = a_folder(tmp_path / "a", record)
    assert main(["status", str(root)]) == 0
    assert use_lines(capsys)[0] == "GPU use trainer: 2 GPUs, 35% busy, 2.0 of 8.0 GiB, idle for 50% of the attempt"
    a_folder(root, replace(record, state="Complete"))
    assert main(["status", str(root)]) == 0
    assert use_lines(capsys) == [], "what is over uses nothing"


@pytest.mark.parametrize(("gpus", "age", "told"), [(2, NVML_SECONDS + 1, 1), (2, 1.0, 0), (0, NVML_SECONDS + 1, 0)])
def test_missing_nvml_is_reported_after_first_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: int, age: float, told: int
) -> None:
    record = new_record("a", 1, "again", {"trainer": gpus})
    root = a_folder(tmp_path / "a", replace(record, began=record.time - age, gpu_use={"trainer": {"gpus": "x"}}))
    assert main(["status", str(root)]) == 0
    assert [line.startswith("GPU use not measured: ") for line in use_lines(capsys)] == [True] * told
