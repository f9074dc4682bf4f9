"""Selection of a model's attention kernel by device, packages and a trial, before the model is loaded.

Rank 0 selects and logs the kernel for all ranks.

The trial runs a package's kernel on a row of five tokens, which detects missing features of its build before the first step.
FlashAttention 3 can be built with a part of its kernels (without soft cap or some head sizes), but its functions accept all arguments in
every build.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from loguru import logger
from transformers import PreTrainedConfig

from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.attention_kernels import (
    BACKENDS,
    AttentionError,
    Feature,
    Kernel,
    Needs,
    choose_kernel,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.flash import load_package
from rlrun.trainer.modeling.attention.installed import read_machine
from rlrun.trainer.modeling.attention.packed_layout import Scores, row_layout
from rlrun.trainer.ranks.group import Group

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
        reason = f"{type(error).__name__}: {lines[0][-_LONGEST_REASON:]}"
        return f"the installed {package.module} does not support this model's attention ({reason})"
    return None


_HEAD_DIMS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
"""Names of head sizes in configurations."""


def select_kernel(
    asked: AttentionKernel, name: str, needs: Needs, group: Group, *, compute_dtype: torch.dtype | None
) -> Kernel:
    """Select the kernel of a model. All ranks call it together.

    Args:
        asked: value of `trainer.attention`.
        name: name of the model's class, for the log.
        needs: required features of the model.
        group: all ranks, with equal devices and packages.
        compute_dtype: number format of forward and backward. Default: bfloat16 on CUDA.

    Raises:
        RoleError: the configured kernel cannot compute the model here; raised on all ranks.
    """
    needs = Needs(needs.features | _of_run(group, compute_dtype), needs.head_dim)
    kernel, text = group.broadcast(_choose_kernel(asked, needs, group) if group.leads else None)
    if kernel is None:
        raise RoleError(text, exit_codes.CONFIGURATION)
    if group.leads:
        logger.info(f"{name}: {text}")
    found: Kernel = kernel
    load_package(found)
    return found


def needs_of(config: PreTrainedConfig, features: Iterable[Feature]) -> Needs:
    """Return the required features of a model at its full size.

    Args:
        config: configuration of the model.
        features: features observed in a small model of it (`packed_attention.observed_features`).
    """
    text = config.get_text_config()
    # The layers of Gemma 4 have different head sizes, and its configuration raises an error for a common one.
    layers = list(getattr(text, "per_layer_config", ())) or [text]
    sizes: list[int] = [
        size for layer in layers for name in _HEAD_DIMS if isinstance(size := getattr(layer, name, None), int)
    ]
    heads = getattr(text, "num_attention_heads", None)
    if not sizes and heads:
        sizes.append(text.hidden_size // heads)
    return Needs(frozenset(features), max(sizes, default=0))


def _choose_kernel(asked: AttentionKernel, needs: Needs, group: Group) -> tuple[Kernel | None, str]:
    known = read_machine(group.device)
    while True:
        try:
            choice = choose_kernel(asked, needs, known)
        except AttentionError as error:
            return None, str(error)
        problem = kernel_refusal(choice.kernel, needs, group.device)
        if problem is None:
            return choice.kernel, str(choice)
        known = known.without_kernel(choice.kernel, problem)


def _of_run(group: Group, compute_dtype: torch.dtype | None) -> frozenset[Feature]:
    found: set[Feature] = set()
    if group.device.type == "cuda" and compute_dtype == torch.float32:
        found.add("float32")
    if group.dims.cp > 1:
        found.add("context")
    return frozenset(found)
