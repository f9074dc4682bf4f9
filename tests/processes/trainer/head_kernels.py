"""Program that runs the LM head's Triton kernels in Triton's interpreter and compares them with float64.

Triton reads `TRITON_INTERPRET` at import, so this needs a separate process.
"""

from __future__ import annotations

from unittest import mock

import torch

from rlrun.trainer.learning import lm_head
from rlrun.trainer.learning.head import fused, triton_kernels
from tests.support.heads import computed, definition, inputs, near


def main() -> None:
    """Raise `AssertionError` if a result is too inaccurate."""
    with (
        mock.patch.object(triton_kernels, "BLOCK", 32),
        mock.patch.object(lm_head, "fused_kernel", return_value=triton_kernels.TritonKernel()),
    ):
        for vocabulary in (32, 37):
            for how in ("policy", "known", "frozen"):
                of = inputs(5, 6, vocabulary)
                found = computed(of, known=how == "known", chunk=3, frozen=how == "frozen")
                near(found, definition(of), values=1e-6, gradients=1e-6)
                print(how, vocabulary)
        large = inputs(4, 8, 40, scale=300.0)
        near(computed(large, known=False, chunk=4), definition(large), values=3e-5, gradients=1e-5)
        print("large")
        of = inputs(6, 32, 80)
        rounded = of._replace(hidden=of.hidden.bfloat16().double(), weight=of.weight.bfloat16().double())
        exact = mock.patch.object(fused, "float32_product", lambda a, b: a.float() @ b.float())
        logits = mock.patch.object(
            triton_kernels.TritonKernel, "logits", lambda self, hidden, weight, *_: hidden.float() @ weight.float().T
        )
        with exact, logits:  # As on a GPU: sums of bfloat16 products are not rounded.
            for how in ("policy", "known", "frozen"):
                found = computed(rounded, known=how == "known", chunk=4, dtype=torch.bfloat16, frozen=how == "frozen")
                near(found, definition(rounded), values=1e-5, gradients=5e-3)
                print("bfloat16", how)


if __name__ == "__main__":
    main()
