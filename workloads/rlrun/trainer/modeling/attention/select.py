"""Selection of a model's attention kernel before it is loaded; rank 0 selects and logs it for all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from loguru import logger
from transformers import PreTrainedConfig

from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.kernel_choice import AttentionError, Needs, choose_kernel
from rlrun.fit.kernel_table import Feature, Kernel
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.attention.machine import read_machine
from rlrun.trainer.modeling.attention.packages import load_package
from rlrun.trainer.modeling.attention.trial import kernel_refusal
from rlrun.trainer.ranks.group import Group

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
        known = known.without(choice.kernel, problem)


def _of_run(group: Group, compute_dtype: torch.dtype | None) -> frozenset[Feature]:
    found: set[Feature] = set()
    if group.device.type == "cuda" and compute_dtype == torch.float32:
        found.add("float32")
    if group.dims.cp > 1:
        found.add("context")
    return frozenset(found)
