"""Program that compiles the LM head's Triton kernels for an H100 without a GPU, and prints their loads and stores.

One line per kernel: its name, the bytes of its machine code, and the widths of its loads and stores of global memory inside loops.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlrun.trainer.learning.head import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
COMMON = {"logits": "*fp32", "targets": "*i64", "temperatures": "*fp32", "logprobs": "*fp32"}
SIZES = {"vocabulary": "i32", "stride": "i32", "width": "constexpr"}
KERNELS = {
    triton_kernels._statistics: {**COMMON, "entropies": "*fp32", **SIZES},
    triton_kernels._residual: {**COMMON, "residual": "*bf16", **SIZES},
}


def main() -> None:
    """Compile with the hints from torch's memory alignment and a vocabulary that is a multiple of 16."""
    for kernel, signature in KERNELS.items():
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(signature) - 1)}
        source = ASTSource(kernel, signature, {"width": triton_kernels.BLOCK}, aligned)
        made = triton.compile(source, target=HOPPER, options={"num_warps": triton_kernels.WARPS})
        wide = {kind: sorted(set(re.findall(rf"{kind}\.global\.(v\d)", made.asm["ptx"]))) for kind in ("ld", "st")}
        print(
            made.metadata.name, len(made.asm["cubin"]), *(f"{kind}:{','.join(found)}" for kind, found in wide.items())
        )


if __name__ == "__main__":
    main()
