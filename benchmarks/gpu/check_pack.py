"""Checks of the unpacked packs: imports and symbols on any machine, kernels on a GPU.

python -m benchmarks.gpu.check_pack --site FOLDER --results FOLDER [--gpu | --symbols]

Run it with the packs in PYTHONPATH. The kernels are FlashAttention 3, RMSNorm and rotary embedding of vLLM, compared with
torch: they also show that the driver never reads code that was replaced by zeros. Their results select the arguments of
the engine in the second call (`engine_choice`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import CUDA
from benchmarks.gpu.engine_choice import choose_engine, write_choice
from benchmarks.gpu.pack_run import LIBRARIES
from benchmarks.gpu.results import Report

NAMES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("SamplingParams", "envs"),
    "vllm.config": ("set_current_vllm_config",),
    "vllm.engine.protocol": ("EngineClient",),
    "vllm.entrypoints.launchers.api_server.app_state": ("init_app_state",),
    "vllm.entrypoints.launchers.api_server.entry": ("build_async_engine_client",),
    "vllm.entrypoints.launchers.app": ("build_app",),
    "vllm.entrypoints.launchers.cli_args": ("make_arg_parser", "validate_parsed_serve_args"),
    "vllm.entrypoints.launchers.launcher": ("serve_http",),
    "vllm.inputs.engine": ("tokens_input",),
    "vllm.logger": ("configure_logging_from_args",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
    "vllm.model_executor.layers.quantization.base_config": ("QuantizeMethodBase",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.model_loader": ("get_model_loader",),
    "vllm.model_executor.model_loader.reload.layerwise": (
        *("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info", "get_layer_tensors"),
        *("_get_original_loader", "_copy_and_restore_kernel_tensors"),
    ),
    "vllm.model_executor.model_loader.reload.meta": ("SKIP_TENSORS", "materialize_meta_tensor"),
    "vllm.outputs": ("CompletionOutput",),
    "vllm.sampling_params": ("RequestOutputKind",),
    "vllm.utils": ("random_uuid",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.utils.system_utils": ("set_ulimit",),
    "vllm.v1.engine.core": (),
    "vllm.v1.engine.utils": (),
    "vllm.v1.worker.gpu_worker": ("Worker",),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner",),
    "vllm.v1.attention.backends.flash_attn": ("FlashAttentionBackend",),
    "vllm.model_executor.models.qwen3": ("Qwen3ForCausalLM",),
    "rlrun.inference.plugin": ("load",),
    "rlrun.inference.engine_server": ("serve_engine",),
    "rlrun.inference.weights.loading": ("Loading",),
    "rlrun.cli.main": (),
    "rlrun.trainer.gpu_memory": ("GPUMemory",),
    "rlrun.orchestrator.main": (),
}
"""Modules of the engine, with the names that RLRun uses of them, and RLRun's own."""
_PREFIXES = ("aoti_", "torch_")
"""Names of torch's C interface, by which libraries work with several releases of torch."""


def import_modules(names: Mapping[str, Iterable[str]] = NAMES) -> dict[str, str]:
    """Import modules and return the problem of each module, "" if it has its names."""
    problems = {}
    for module, wanted in names.items():
        try:
            imported = importlib.import_module(module)
            missing = [name for name in wanted if not hasattr(imported, name)]
            problems[module] = f"no name {missing[0]}" if missing else ""
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            problems[module] = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})"[-400:]
    return problems


def _symbols(library: Path, kind: str) -> set[str]:
    command = ["nm", "--dynamic", "--format=posix", f"--{kind}-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0].split("@")[0] for line in lines if line}


def undefined_symbols(libraries: Iterable[Path], torch_folder: Path) -> dict[str, set[str]]:
    """Return the names of torch's C interface that a library needs and this torch lacks, by library."""
    defined: set[str] = set()
    for file in torch_folder.glob("libtorch*.so"):
        defined |= _symbols(file, "defined")
    found = {}
    for library in libraries:
        needed = {name for name in _symbols(library, "undefined") if name.startswith(_PREFIXES)}
        found[library.name] = needed - defined
    return found


def installed_version() -> str:
    """Return vLLM's version, and check that RLRun's plugin is found.

    Raises:
        RuntimeError: a distribution is missing or incomplete.
    """
    from importlib.metadata import entry_points, version

    plugins = [point.value for point in entry_points(group="vllm.general_plugins")]
    if "rlrun.inference.plugin:load" not in plugins:
        raise RuntimeError(
            f"vllm.general_plugins has {plugins}, but not RLRun's: install the wheel, not only its folder"
        )
    return version("vllm")


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the right tensor."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def check_rms_norm(rows: int, hidden: int) -> float:
    """Return the relative error of vLLM's RMSNorm against float64."""
    x = torch.randn(rows, hidden, device=CUDA, dtype=torch.bfloat16)
    weight, out = torch.rand(hidden, device=CUDA, dtype=torch.bfloat16), torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    exact = x.double()
    return relative_error(out, exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double())


def check_rotary(tokens: int, heads: int, size: int = 128) -> float:
    """Return the relative error of vLLM's rotary embedding (halves, not pairs) against float64."""
    positions = torch.arange(tokens, device=CUDA)
    angles = positions[:, None].double() / 1e6 ** (torch.arange(0, size, 2, device=CUDA).double() / size)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(torch.bfloat16)
    query, key = (torch.randn(tokens, heads * size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    cos, sin = (half[:, None] for half in cache.double().chunk(2, -1))
    a, b = query.double().view(tokens, heads, size).chunk(2, -1)
    right = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(tokens, -1)
    torch.ops._C.rotary_embedding(positions, query, key, size, cache, True)
    return relative_error(query, right)


def check_flash_attention(tokens: int, heads: int, kv_heads: int, size: int = 128) -> float:
    """Return the relative error of vLLM's causal FlashAttention 3 against float64."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v = (torch.randn(tokens, n, size, device=CUDA, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
    bounds = torch.tensor([0, tokens], device=CUDA, dtype=torch.int32)
    found = flash_attn_varlen_func(
        q, k, v, max_seqlen_q=tokens, cu_seqlens_q=bounds, max_seqlen_k=tokens, cu_seqlens_k=bounds, causal=True,
        fa_version=3,
    )  # fmt: skip
    exact = (one.double().transpose(0, 1) for one in (q, *(t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))))
    right = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).transpose(0, 1)
    return relative_error(found, right)


KERNELS: Mapping[str, Callable[[], float]] = {
    **{f"RMSNorm {r} x {h}": partial(check_rms_norm, r, h) for r, h in ((7, 128), (64, 1024), (4096, 3072))},
    **{f"RoPE {t} x {h}": partial(check_rotary, t, h) for t, h in ((1, 8), (64, 16), (1024, 16))},
    **{
        f"FA3 {t} x {h}/{k}": partial(check_flash_attention, t, h, k)
        for t, h, k in ((17, 16, 8), (256, 16, 8), (2048, 32, 8))
    },
}
"""Kernels by name and shape; each returns its relative error."""
MAX_ERROR = 1e-2
"""Rounding to bfloat16 alone is up to 4e-3."""


def check_symbols(report: Report, libraries: Sequence[Path]) -> int:
    """Add a row for each library and return the number of those with undefined symbols of torch."""
    if shutil.which("nm") is None:
        report.put("symbols", "all", {"note": "not checked: nm of binutils is not installed"})
        return 0
    undefined = undefined_symbols(libraries, Path(torch.__file__).parent / "lib")
    for name, missing in undefined.items():
        report.put("symbols", name, {"undefined": len(missing), "note": ", ".join(sorted(missing)[:3])})
    return sum(map(bool, undefined.values()))


def check_gpu(report: Report, site: Path, libraries: Sequence[Path]) -> int:
    """Check machine, libraries and kernels, write the engine's arguments, and return the number of wrong rows."""
    report.put("versions", "torch", {"value": torch.__version__})
    report.put("versions", "GPU", {"value": torch.cuda.get_device_name()})
    wrong = check_machine(report)
    problem = load_libraries(site, libraries)
    report.put("libraries", "vllm", {"right": not problem, "note": problem})
    wrong += bool(problem) + check_kernels(report)
    choice = choose_engine(report.sections["kernels"])
    write_choice(site, choice)
    report.put("engine", "arguments", {"value": " ".join(choice.arguments), "note": choice.reason})
    return wrong


def check_machine(report: Report) -> int:
    """Check what `rlrun local` and vLLM need besides CUDA, and return the number of problems."""
    problems = {}
    for name, check in (("NVML, by which vLLM finds the GPU", find_nvml), ("GPUs of rlrun local", find_gpus)):
        try:
            check()
            problems[name] = ""
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"[:300]
        report.put("machine", name, {"right": not problems[name], "note": problems[name]})
    return sum(map(bool, problems.values()))


def find_nvml() -> None:
    """Raise an error if NVML finds no GPU."""
    import pynvml

    pynvml.nvmlInit()
    if not pynvml.nvmlDeviceGetCount():
        raise RuntimeError("NVML finds no GPU")


def find_gpus() -> None:
    """Raise an error if `rlrun local` finds no GPU: it reads the driver's files, without CUDA."""
    from rlrun.local.gpus import Machine

    if not Machine.here().visible_gpus(os.environ):
        raise RuntimeError("neither /dev nor /proc/driver/nvidia shows a GPU")


def load_libraries(site: Path, libraries: Iterable[Path]) -> str:
    """Load vLLM's libraries without the package, which needs the second pack, and make its folders importable.

    Returns:
        Problem of the first library that cannot be loaded, or "".
    """
    package = types.ModuleType("vllm")
    package.__path__ = [str(site / "vllm")]
    sys.modules["vllm"] = package
    for library in libraries:
        if "torch" in library.name:
            try:
                torch.ops.load_library(library)
            except OSError as error:
                return f"{library.name}: {error}"[:300]
    return ""


def check_kernels(report: Report) -> int:
    """Run all kernels on the GPU and return the number of wrong or failed ones."""
    wrong = 0
    for name, check in KERNELS.items():
        report.begin("kernels", name)
        try:
            error = check()
            row: dict[str, Any] = {"relative error": error, "right": error <= MAX_ERROR}
        except Exception as failure:
            row = {"right": False, "note": f"{type(failure).__name__}: {failure}"[:300]}
        wrong += not row["right"]
        report.put("kernels", name, row)
    return wrong


def main() -> int:
    """Run the checks and return 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="folder of the unpacked packs")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--gpu", action="store_true", help="run kernels instead of imports: before the second pack is there"
    )
    parser.add_argument(
        "--symbols", action="store_true", help="check only the symbols: before the second pack is there"
    )
    options = parser.parse_args()
    if options.gpu and not torch.cuda.is_available():
        print("error: torch finds no GPU; run this on a machine with a GPU and its driver", file=sys.stderr)
        return 1
    report = Report(options.results, "packs", "Packs of a complete run", fresh=not options.gpu)
    libraries = [options.site / "vllm" / f"{name}.abi3.so" for name in LIBRARIES]
    wrong = check_symbols(report, libraries)
    if options.gpu:
        wrong += check_gpu(report, options.site, libraries)
    elif not options.symbols:
        problems = import_modules()
        report.put("versions", "torch", {"value": torch.__version__})
        report.put("versions", "vllm", {"value": installed_version()})
        for module, problem in problems.items():
            report.put("imports", module, {"right": not problem, "note": problem})
        wrong += sum(map(bool, problems.values()))
    print(report.text())
    print(json.dumps({"wrong": wrong}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
