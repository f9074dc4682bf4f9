"""Checks of GPU images that need no package of an image, and the page with measured sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.image_sizes import LIMITS_GB, Measured, page_text
from tools import gpu_image_check
from tools.gpu_image_check import check_nvcc, check_variables, checks_of, find_nvcc
from tools.image_sizes import Layer

ROOT = Path(__file__).parents[3]


def make_nvcc(folder: Path) -> Path:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return nvcc


def test_cuda_compiler_is_found_on_path_and_in_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "cuda/bin"))
    present = find_nvcc()
    packaged = make_nvcc(tmp_path / "site/nvidia/cu13")
    assert find_nvcc(tmp_path / "site") == sorted([*present, str(packaged)])
    monkeypatch.setattr(gpu_image_check.sysconfig, "get_path", lambda _: str(tmp_path / "site"))
    with pytest.raises(AssertionError, match=r"found .*nvidia/cu13/bin/nvcc"):
        check_nvcc()
    make_nvcc(tmp_path / "cuda")
    assert str(tmp_path / "cuda/bin/nvcc") in find_nvcc()


def test_missing_variable_of_nvidia_runtime_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gpu_image_check.VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert check_variables().startswith("NVIDIA_VISIBLE_DEVICES=all")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    with pytest.raises(AssertionError, match="void"):
        check_variables()


def test_role_has_its_checks() -> None:
    assert checks_of("trainer")["nvcc"] is check_nvcc
    assert checks_of("inference")["nvcc"] is check_nvcc
    assert checks_of("trainer", devel=True)["nvcc"] is gpu_image_check.check_nvcc_compiles
    assert checks_of("trainer", devel=True).keys() - checks_of("trainer").keys() == {"extension of torch"}
    assert checks_of("inference").keys() - checks_of("trainer").keys() == {"vLLM", "NVRTC"}


def test_page_of_sizes_shows_layers_failures_and_packages() -> None:
    layers = [
        Layer(77_000_000, "x"),
        Layer(5_000_000_000, "--requirement /opt/requirements/common.txt"),
        Layer(10, "y"),
    ]
    checks = {"nvcc": {"passed": True, "text": "absent"}, "Triton kernel": {"passed": False, "text": "a|b"}}
    text = page_text([Measured("trainer", layers, checks, {"torch": 1_500_000_000})], "A note.")
    assert "| trainer | 5.08 GB | 6 GB | not measured | 1 of 2 |" in text
    pulled = page_text([Measured("trainer", layers, checks, {}, 2_350_000_000)], "A note.")
    assert "| trainer | 5.08 GB | 6 GB | 2.35 GB | 1 of 2 |" in pulled
    assert "| base | 77.0 |\n| packages of common.txt | 5,000.0 |\n| 1 smaller layers | 0.0 |" in text
    assert "| Triton kernel | **no** | a/b |" in text
    assert "| torch | 1,500 |" in text


def test_documented_sizes_are_those_of_the_measured_page() -> None:
    measured = (ROOT / "benchmarks/results/image_sizes.md").read_text()
    install = (ROOT / "docs/install.md").read_text().partition("## Sizes of the images")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) GB \| \d+ GB \| ([\d.]+) GB \| (\d+) of (\d+) \|", measured, re.MULTILINE)
    assert {role for role, *_ in rows} == LIMITS_GB.keys()
    for role, size, pulled, passed, checks in rows:
        assert f"| {role} | {size} GB | {pulled} GB |" in install
        assert float(size) <= LIMITS_GB[role]
        assert passed == checks
