"""Checks that run inside an image for GPUs, on a machine without one; standard library and the image's own packages only.

    docker run --rm -v "$PWD/tools/gpu_image_check.py:/check.py:ro" IMAGE python /check.py trainer

Prints one JSON object in its last line (checks, and bytes of each package) and returns 1 if a check fails.
`python -m benchmarks.image_sizes` runs it for its table.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROLES = ("trainer", "inference")
KERNEL = """
#include <cub/cub.cuh>
#include <cuda_bf16.h>
__global__ void sum_block(const __nv_bfloat16 *x, float *out) {
    __shared__ cub::BlockReduce<float, 128>::TempStorage storage;
    float sum = cub::BlockReduce<float, 128>(storage).Sum(__bfloat162float(x[threadIdx.x]));
    if (threadIdx.x == 0) *out = sum;
}
extern "C" int launch(const __nv_bfloat16 *x, float *out) { sum_block<<<1, 128>>>(x, out); return cudaGetLastError(); }
"""
tl: Any = None
"""Triton's language; it is imported with the first kernel, so that other checks do not need it."""
VARIABLES = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
HOPPER = 90
"""Compute capability 9.0 as Triton writes it."""
FLASH_ATTENTION_4 = "flash-attn-4"


def find_nvcc(site: Path | None = None) -> list[str]:
    """Return every CUDA compiler: on the PATH, in /usr/local, and in the packages below `site`."""
    places = [shutil.which("nvcc"), *Path("/usr/local").glob("cuda*/bin/nvcc")]
    places += site.glob("nvidia/*/bin/nvcc") if site is not None else ()
    return sorted({str(place) for place in places if place is not None})


def check_nvcc() -> str:
    """Fail if the image has a CUDA compiler."""
    found = find_nvcc(Path(sysconfig.get_path("purelib")))
    assert not found, f"found {', '.join(found)}"
    return "absent"


def check_nvcc_compiles() -> str:
    """Fail if nvcc cannot compile and link a kernel with CUB and bfloat16 for Hopper."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(KERNEL)
        command = ["nvcc", "-std=c++17", f"-arch=sm_{HOPPER}a", "-shared", "-Xcompiler", "-fPIC", str(source)]
        done = subprocess.run([*command, "-lcudart", "-o", f"{folder}/kernel.so"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr.strip()[-250:]
    return "compiles and links a kernel with CUB for sm_90a"


def check_extension() -> str:
    """Fail if torch cannot compile and link a CUDA extension."""
    from torch.utils import cpp_extension

    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    declaration = "#include <torch/extension.h>\nvoid add_one(torch::Tensor x);\n"
    kernel = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
__global__ void add_one_kernel(float *x, int count) { int i = blockIdx.x * 128 + threadIdx.x; if (i < count) x[i] += 1; }
void add_one(torch::Tensor x) {
    add_one_kernel<<<(x.numel() + 127) / 128, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), x.numel());
}
"""
    with tempfile.TemporaryDirectory() as folder:
        module = cpp_extension.load_inline(
            "rlrun_check", [declaration], [kernel], functions=["add_one"], build_directory=folder
        )
        assert callable(module.add_one)
    return "torch.utils.cpp_extension compiles, links and loads a kernel for sm_90"


def check_variables() -> str:
    """Fail if NVIDIA's container runtime would mount no GPU."""
    found = {name: os.environ.get(name) for name in VARIABLES}
    assert found == VARIABLES, f"got {found}"
    return " ".join(f"{name}={value}" for name, value in VARIABLES.items())


def compile_triton_kernel(capability: int = HOPPER) -> Mapping[str, Any]:
    """Compile a small kernel for a GPU that is not here and return Triton's results by stage: ptx, cubin and others.

    Machine code needs ptxas, which is in Triton's wheel.
    """
    global tl  # Triton reads the names in a kernel from its module
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tl = triton.language
    kernel = triton.jit(add_vectors)
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": 128})
    made: Mapping[str, Any] = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
    return made


def add_vectors(x, y, out, count, BLOCK):  # type: ignore[no-untyped-def]  # noqa: N803
    """Triton kernel: `out = x + y` of float32 vectors."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out + offsets, tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside), mask=inside)


def check_triton() -> str:
    """Fail if Triton makes no machine code for Hopper."""
    made = compile_triton_kernel()
    assert ".target sm_90" in made["ptx"], "the PTX is for another GPU"
    assert made["cubin"][:4] == b"\x7fELF", "ptxas returned no machine code"
    return f"{len(made['cubin']):,} bytes of machine code for sm_90"


def check_launcher() -> str:
    """Fail if gcc cannot build what Triton builds at its first kernel: a Python module with CUDA's header."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None, "triton is not installed"  # noqa: PT018
    include = Path(spec.origin).parent / "backends/nvidia/include"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "launcher.c"
        source.write_text(
            '#include "cuda.h"\n#include <Python.h>\nPyObject *f(void) { return PyLong_FromLong(CUDA_VERSION); }\n'
        )
        headers = [f"-I{include}", f"-I{sysconfig.get_path('include')}"]
        command = ["gcc", "-shared", "-fPIC", *headers, str(source), "-o", str(source.with_suffix(".so"))]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return "gcc, Python.h and cuda.h"


def check_torch_compile() -> str:
    """Fail if torch's compiler finds no C++ compiler."""
    import torch

    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    got = compiled(torch.linspace(0, 1, 64))
    torch.testing.assert_close(got, torch.sin(torch.linspace(0, 1, 64)) * 2 + 1)
    return f"torch {torch.__version__} compiles with g++"


def check_flash_attention_4() -> str:
    """Fail if FlashAttention 4 cannot be imported."""
    version = metadata.version(FLASH_ATTENTION_4)
    interface = importlib.import_module("flash_attn.cute.interface")
    assert callable(interface._flash_attn_fwd)
    assert callable(interface._flash_attn_bwd)
    return version


def check_engine() -> str:
    """Fail if vLLM's server cannot be imported, or is the build for CPUs."""
    importlib.import_module("vllm.entrypoints.openai.api_server")
    return metadata.version("vllm")


def check_nvrtc() -> str:
    """Fail if NVRTC cannot compile a kernel with CUB, as humming-kernels does for some quantized models."""
    import cuda.bindings  # type: ignore[import-untyped,unused-ignore]
    import torch
    from cuda.bindings import nvrtc  # type: ignore[import-untyped,unused-ignore]

    assert cuda.bindings.__version__.split(".")[0] == (torch.version.cuda or "").split(".")[0], (
        f"cuda.bindings {cuda.bindings.__version__} is for another CUDA release than torch's {torch.version.cuda}"
    )
    include = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
    options = [f"-I{include}", f"-I{include}/cccl", f"--gpu-architecture=sm_{HOPPER}a", "-std=c++17"]
    source = KERNEL.partition('extern "C"')[0].replace("cub/cub.cuh", "cub/block/block_reduce.cuh")
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode(errors="replace").strip()[-250:])
    return f"cuda.bindings {cuda.bindings.__version__} compiles a kernel with CUB for sm_90a, without nvcc"


def check_flash_attention_3() -> str:
    """Fail if the library of FlashAttention 3 does not load or registers no kernels."""
    import torch

    importlib.import_module("flash_attn_interface")
    names = ("flash_attn_3::fwd", "flash_attn_3::bwd")
    lacking = [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    assert not lacking, f"no kernel of {', '.join(lacking)}"
    return metadata.version("flash-attn-3")


def check_infiniband() -> str:
    """Fail if NCCL would find no InfiniBand library and use TCP without a message."""
    import ctypes

    ctypes.CDLL("libibverbs.so.1")
    drivers = sorted(path.name for path in Path("/etc/libibverbs.d").glob("*.driver"))
    assert "mlx5.driver" in drivers, f"no driver of ConnectX cards, only {drivers}"
    return f"libibverbs with {len(drivers)} drivers"


def list_packages() -> dict[str, int]:
    """Return bytes of the installed packages by name, the largest first."""
    sizes: dict[str, int] = {}
    for distribution in metadata.distributions():
        files = [Path(str(file.locate())) for file in distribution.files or ()]
        sizes[distribution.name] = sum(file.stat().st_size for file in files if file.is_file())
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def checks_of(role: str, *, devel: bool = False) -> dict[str, Callable[[], str]]:
    """Return the checks of a role's image by name."""
    checks = {
        "variables of NVIDIA's runtime": check_variables,
        "Triton kernel": check_triton,
        "Triton launcher": check_launcher,
        "torch.compile": check_torch_compile,
        "InfiniBand": check_infiniband,
        "FlashAttention 3": check_flash_attention_3,
        "FlashAttention 4": check_flash_attention_4,
    }
    if devel:
        checks |= {"nvcc": check_nvcc_compiles, "extension of torch": check_extension}
    else:
        checks["nvcc"] = check_nvcc
    return checks | ({"vLLM": check_engine, "NVRTC": check_nvrtc} if role == "inference" else {})


def main() -> int:
    """Run the checks of the role in the first argument; return the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in ROLES:
        print(f"usage: gpu_image_check.py {'|'.join(ROLES)} [--devel]", file=sys.stderr)
        return 2
    results: dict[str, dict[str, Any]] = {}
    for name, check in checks_of(sys.argv[1], devel="--devel" in sys.argv).items():
        try:
            results[name] = {"passed": True, "text": check()}
        except Exception as error:  # every check is reported, also after a failure
            results[name] = {"passed": False, "text": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps({"checks": results, "packages": list_packages()}))
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
