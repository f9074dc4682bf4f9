"""Abilities of a machine: versions, signatures, implementations, ceilings. Half a minute.

python -m benchmarks.gpu.probe --results FOLDER [--dry]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import attention as torch_attention

from benchmarks.gpu.clock import CPU, CUDA, milliseconds
from benchmarks.gpu.results import Deadline, Report
from rlrun.trainer.modeling.packed_attention import packed_attention, row_layout

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "pydantic", "loguru", "aiohttp", "pytest")
OPTIONAL = ("flash_attn", "flash_attn_interface", "flash_attn.cute", "vllm")


def versions() -> dict[str, Any]:
    """Versions of Python, the device and the packages; None for one that is missing."""
    found: dict[str, Any] = {"python": platform.python_version(), "CUDA": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found |= {program: shutil.which(program) is not None for program in ("gcc", "g++", "nvcc")}
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, capability, memory."""
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    usable, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "GiB free": usable / 2**30,
        "GiB": total / 2**30,
        "cuDNN": torch.backends.cudnn.version(),
        "bfloat16": torch.cuda.is_bf16_supported(),
    }


def implementations() -> dict[str, Any]:
    """Attention kernels that can be imported, and the arguments of torch's varlen."""
    from torch.nn.attention.varlen import varlen_attn

    found: dict[str, Any] = {name: _importable(name) for name in OPTIONAL}
    found["varlen_attn"] = str(inspect.signature(varlen_attn))
    listing = getattr(torch_attention, "list_flash_attention_impls", None)  # torch >= 2.11
    found["flash implementations of torch"] = ", ".join(listing()) if listing is not None else None
    return found


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package around it
        return False


def works(device: torch.device) -> dict[str, Callable[[], object]]:
    """Small things that everything after this needs."""

    def attention() -> None:
        inputs = [torch.randn(1, heads, 96, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        query, key, value = (tensor.requires_grad_() for tensor in inputs)
        packed = row_layout((63, 33), device)
        packed_attention(torch.nn.Identity(), query, key, value, None, packed=packed)[0].sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape

    def compiled() -> None:
        ones = torch.ones(64, device=device)
        assert float(torch.compile(lambda x: (x * 2).sum())(ones)) == 128

    def out_dtype() -> None:
        a = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        assert torch.mm(a, a, out_dtype=torch.float32).dtype == torch.float32

    def activated() -> None:
        torch_attention.activate_flash_attention_impl("FA3")
        torch_attention.restore_flash_attention_impl()

    found: dict[str, Callable[[], object]] = {"grouped attention, forward and backward": attention}
    if device.type == "cuda":
        found |= {
            "torch.compile": compiled,
            "mm with out_dtype": out_dtype,
            "activate_flash_attention_impl('FA3')": activated,
        }
    return found


def ceilings(device: torch.device, size: int, megabytes: int) -> dict[str, float]:
    """GB/s of a copy, read and written, and TFLOP/s of a bf16 product of random matrices."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy = milliseconds(lambda: target.copy_(source), device)
    product = milliseconds(lambda: a @ b, device)
    return {"copy GB/s": 2 * source.nbytes / copy / 1e6, f"bf16 {size}^3 TFLOP/s": 2 * size**3 / product / 1e9}


def probe(folder: Path, *, dry: bool, seconds: float) -> Mapping[str, Any]:
    """Write probe.json and probe.md; the sections."""
    deadline, device = Deadline.after(seconds), CPU if dry else CUDA
    report = Report(folder, "probe", "What this machine has and can", fresh=True)
    for section, facts in (
        ("versions", versions()),
        ("device", device_facts(device)),
        ("implementations", implementations()),
    ):
        for name, value in facts.items():
            report.put(section, name, {"value": value})
    for name, work in works(device).items():
        report.begin("works", name)
        try:
            work()
            report.put("works", name, {"value": True})
        except Exception as error:
            report.put("works", name, {"value": False, "note": f"{type(error).__name__}: {error}"[:300]})
    if deadline.left > 0:
        for name, value in ceilings(device, *((64, 1) if dry else (8192, 4096))).items():
            report.put("ceilings", name, {"value": value})
    else:
        report.put("ceilings", "all", {"note": "left out: no time"})
    return report.sections


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    probe(arguments.results, dry=arguments.dry, seconds=arguments.seconds)
    print((arguments.results / "probe.md").read_text())


if __name__ == "__main__":
    main()
