"""Trial of a package's kernel on a row of five tokens, which detects missing features of its build before the first step.

FlashAttention 3 can be built with a part of its kernels (without soft cap or some head sizes), but its functions accept all arguments in
every build.
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
    """Return the reason why an installed package cannot compute the model's attention, forward and backward, or None.

    Args:
        kernel: kernel that device and table allow.
        needs: required features of the model.
        device: device of the trainer.
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
    except Exception as error:  # libraries raise many kinds of errors
        lines = str(error).strip().splitlines() or ["no message"]
        said = f"{type(error).__name__}: {lines[0][-_LONGEST_REASON:]}"
        return f"the installed {package.module} does not support this model's attention ({said})"
    return None
