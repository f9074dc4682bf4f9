"""`rlrun doctor` on this machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from rlrun.cli.main import main
from rlrun.local import machine_facts
from rlrun.local.gpus import LOCKS_VARIABLE, GpuLocks, Machine
from rlrun.runtime import exit_codes

ONE = Machine(["GPU-1"])
CLASSES = '{"items": [{"metadata": {"name": "shared"}, "provisioner": "nfs.csi.k8s.io"}]}'
"""Answer of `kubectl get storageclass --output=json`."""


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine with a GPU and a cluster that refuses requests; torch is not imported."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\nif [ $1 = get ]; then echo '{CLASSES}'; exit; fi\necho no\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: ONE))
    monkeypatch.setattr(
        machine_facts, "_ASK_TORCH", 'print(\'a warning\'); print(\'{"cuda": "13.0", "gpus": 1, "names": ["X"]}\')'
    )


def test_doctor_reports_each_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locks = GpuLocks(tmp_path / "locks")
    held = locks.take_lock("GPU-1", shared=False)
    assert held is not None
    code = main(["doctor", "--json", "--output-dir", str(tmp_path / "runs" / "of-nobody")])
    os.close(held)
    document = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in document["checks"]}
    assert code == (exit_codes.UNAVAILABLE if any(c["state"] == "fail" for c in found.values()) else exit_codes.OK)
    assert found["torch"]["said"].endswith("for CUDA 13.0")
    assert found["GPUs"]["said"] == "X"
    assert "is used by another run" in found["GPU 0"]["said"]
    assert found["cluster"]["said"] == "you may not create RLRuns in this namespace"
    assert "storageClassName: shared" in found["storage class"]["fix"]
    assert found["hub"]["state"] == "note"
    assert main(["doctor"]) == code
    assert "this machine can: " in capsys.readouterr().out


def test_doctor_probes_kernels_in_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process runs the trainer's own probe; only the GPU is replaced."""
    device = "import torch; torch.cuda.device_count = lambda: 2; torch.cuda.get_device_name = lambda device: 'X'; "
    monkeypatch.setattr(
        machine_facts,
        "_ASK_KERNELS",
        f"{device}torch.cuda.get_device_capability = lambda device: (9, 0); {machine_facts._ASK_KERNELS}",
    )
    main(["doctor", "--json"])
    (found,) = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "attention"]
    assert found["state"] == "note"
    assert found["said"].startswith("varlen for heads of 128: varlen is the first that X (compute capability 9.0)")
    assert "not fa3: flash_attn_interface is not installed (make flash-attention-3" in found["said"]
    assert "flash2" not in found["said"]
    monkeypatch.setattr(machine_facts, "_ASK_KERNELS", "raise ImportError('libcuda.so.1: cannot open')")
    main(["doctor"])
    assert "the installed kernels are unknown: ImportError: libcuda.so.1: cannot open" in capsys.readouterr().out


def test_doctor_reports_failed_import_of_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_facts, "_ASK_TORCH", "raise ImportError('libcudart.so.13: cannot open')")
    assert main(["doctor"]) == exit_codes.UNAVAILABLE
    assert "cannot be used: ImportError: libcudart.so.13: cannot open" in capsys.readouterr().out


def test_doctor_reports_reachable_hub() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert machine_facts._hub_facts({"HF_ENDPOINT": f"http://127.0.0.1:{port}"}) == "127.0.0.1"
    assert machine_facts._hub_facts({"HF_ENDPOINT": f"http://127.0.0.1:{port}"}) is None
