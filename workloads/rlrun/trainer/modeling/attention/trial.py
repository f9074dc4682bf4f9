"""A package's kernel tried once on a row of five tokens: what its build leaves out is found before the first step, not by it.

FlashAttention 3 is built with parts of its kernels (no soft cap, some sizes of heads); its functions take all arguments in every build.
"""

from __future__ import annotations

import torch

from rlrun.fit.kernel_choice import Needs
from rlrun.fit.kernel_table import BACKENDS, Kernel
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.layout import row_layout
from rlrun.trainer.modeling.attention.scores import Scores

LENGTHS = (3, 2)
_LONGEST_REASON = 200


def kernel_refusal(kernel: Kernel, needs: Needs, device: torch.device) -> str | None:
    """Reason why an installed package does not compute attention as the model needs it, forward and backward; None: it does.

    Args:
        kernel: one that the device and the table allow.
        needs: the model's.
        device: where the trainer computes.
    """
    package = BACKENDS[kernel].package
    if package is None:
        return None
    heads, size = (2, 1, 1), needs.head_dim or 64
    leaves = [torch.randn(sum(LENGTHS), count, size, device=device, dtype=torch.bfloat16) for count in heads]
    sinks = torch.zeros(heads[0], device=device) if "sinks" in needs.features else None
    scores = Scores(
        size**-0.5,
        window=2 if "window" in needs.features else None,
        softcap=20.0 if "softcap" in needs.features else None,
        sinks=sinks,
    )
    try:
        query, key, value = (leaf.requires_grad_() for leaf in leaves)
        output = attend(kernel, query, key, value, row_layout(LENGTHS, device).segments, scores)
        torch.autograd.grad(output.float().sum(), leaves)
    except Exception as error:  # a library's own, of whatever kind
        lines = str(error).strip().splitlines() or ["no message"]
        said = f"{type(error).__name__}: {lines[0][-_LONGEST_REASON:]}"
        return f"the {package.module} that is installed refuses this model's attention ({said})"
    return None
