"""Checks of GPU images that need torch and Triton: they pass with this machine's compilers, and fail without them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import gpu_image_check


def test_triton_compiles_machine_code_without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "machine code for sm_90" in gpu_image_check.check_triton()
    made = gpu_image_check.compile_triton_kernel(80)
    assert ".target sm_80" in made["ptx"]
    monkeypatch.setattr(gpu_image_check, "compile_triton_kernel", lambda: made)
    with pytest.raises(AssertionError, match="the PTX is for another GPU"):
        gpu_image_check.check_triton()


def test_launcher_needs_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_image_check.check_launcher() == "gcc, Python.h and cuda.h"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="gcc"):
        gpu_image_check.check_launcher()
    gcc = tmp_path / "gcc"
    gcc.write_text("#!/bin/sh\nexit 1\n")
    gcc.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):
        gpu_image_check.check_launcher()
