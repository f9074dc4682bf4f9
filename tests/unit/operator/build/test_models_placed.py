"""Examples with real models are valid, fit into GPU memory and are scheduled on their intended nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRun
from rlrun.api.run_manifest import read_manifest
from rlrun.environments.bundled.dataset import DatasetArgs, Gsm8kArgs
from rlrun.fit.architecture import KNOWN
from rlrun.fit.memory_parts import GIB, memory_of
from rlrun.fit.model_sources import shape_of
from rlrun.fit.report import Surroundings, needs_of
from rlrun_operator.render import RunContext, render_workloads
from rlrun_operator.settings import RenderSettings

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples" / "models").glob("*.yaml"))
GPU, PRODUCT = "nvidia.com/gpu", "nvidia.com/gpu.product"
ANY_GPU = "NVIDIA-L4"
"""Smallest GPU that an example without a product supports."""
NODES = {
    "qwen3-0-6b-gsm8k": [1],
    "qwen3-8b-lora": [1],
    "qwen3-4b-math": [8],
    "qwen2-5-7b-dapo-17k": [8],
    "qwen3-30b-a3b": [8, 8],
    "qwen3-4b-sft": [4],
    "qwen3-1-7b-distill": [4],
}
"""GPUs of each node that an example needs."""
ARGUMENTS: Mapping[str, Any] = {"gsm8k": Gsm8kArgs, "dataset": DatasetArgs}


@dataclass
class Node:
    """GPU node with the usual taint."""

    labels: dict[str, str]
    free: int

    def takes(self, pod: Mapping[str, Any], gpus: int) -> bool:
        """Return whether the scheduler's filters admit the pod."""
        wanted = pod.get("nodeSelector", {})
        bears = any(t.get("key") == GPU and t.get("operator") == "Exists" for t in pod.get("tolerations", []))
        return gpus <= self.free and bears and wanted.items() <= self.labels.items()


def count_gpus(pod: Mapping[str, Any]) -> int:
    """Number of GPUs that a pod requests."""
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["containers"])


def iterate_pods(run: RLRun) -> Iterator[dict[str, Any]]:
    """Pod specs of the run's workloads."""
    ctx = RunContext(run.metadata.name, "team-a", "uid-1", run.spec, 1, RenderSettings())
    for made in render_workloads(ctx).existing:
        if made["kind"] in ("StatefulSet", "Deployment"):
            yield from [made["spec"]["template"]["spec"]] * made["spec"]["replicas"]


def place_pods(run: RLRun, nodes: list[Node]) -> list[dict[str, Any]]:
    """Place the pods one by one, the largest first, and return the pods without a place."""
    left = []
    for pod in sorted((pod for pod in iterate_pods(run) if count_gpus(pod)), key=count_gpus, reverse=True):
        node = next((node for node in nodes if node.takes(pod, count_gpus(pod))), None)
        if node is None:
            left.append(pod)
            continue
        node.free -= count_gpus(pod)
    return left


def nodes_of(run: RLRun, product: str) -> list[Node]:
    return [
        Node({PRODUCT: product, "kubernetes.io/hostname": f"n{i}"}, count)
        for i, count in enumerate(NODES[run.metadata.name])
    ]


def test_examples_cover_every_kind_of_run() -> None:
    assert {path.stem for path in EXAMPLES} == set(NODES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_valid_with_known_models_and_arguments(path: Path) -> None:
    run = read_manifest(path)
    assert run.metadata.name == path.stem
    assert shape_of(run.spec.model, "spec.model", environment={"HF_HOME": "/nowhere"}) in KNOWN.values()
    for environment in run.spec.environments:
        ARGUMENTS[environment.id].model_validate(dict(environment.args))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_fills_exactly_its_intended_nodes(path: Path) -> None:
    run = read_manifest(path)
    product = run.spec.placement.gpu_product or ANY_GPU
    nodes = nodes_of(run, product)
    assert place_pods(run, nodes) == []
    assert [node.free for node in nodes] == [0 for _ in nodes]
    elsewhere = place_pods(run, nodes_of(run, "NVIDIA-Other"))
    assert bool(elsewhere) == (run.spec.placement.gpu_product is not None)
    assert place_pods(run, [Node(node.labels, node.free - 1) for node in nodes_of(run, product)])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_fits_gpu_memory_with_reserve(path: Path) -> None:
    run = read_manifest(path)
    memory = memory_of(run.spec.placement.gpu_product or ANY_GPU)
    assert memory is not None
    reference = run.spec.algorithm.reference
    other = KNOWN[str(reference.model)] if reference is not None else None
    around = Surroundings(shape_of(run.spec.model, "spec.model"), other, {"trainer": memory, "inference": memory})
    needs = needs_of(run.spec, around)
    assert needs
    for one in needs:
        assert one.fits, (one.role, one.total / GIB, one.limit / GIB)
        if one.role == "trainer":
            assert one.total < 0.95 * one.limit
        assert not any("far below maxNumSeqs" in remark for remark in one.remarks)
