"""The trainer's kernels of attention over packed rows, one signature for all: `[T, heads, D]` and the row in, `[T, heads, D]` out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlrun.fit.attention_kernels import AttentionError, Needs, choose_kernel
from rlrun.fit.attention_kernels import Kernel as Name
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.installed import read_machine
from rlrun.trainer.modeling.attention.packed_layout import Layout, Scores

Kernel = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


class UnavailableError(Exception):
    """This machine, or this row, has no such kernel; says why."""


def compute(name: Name, q: Tensor, k: Tensor, v: Tensor, row: Layout) -> Tensor:
    """One of the trainer's kernels.

    Raises:
        UnavailableError: it does not run here.
    """
    try:
        choose_kernel(name, Needs(head_dim=q.shape[2]), read_machine(q.device))
    except AttentionError as error:
        raise UnavailableError(str(error)) from error
    return attend(name, q, k, v, row.segments, Scores(q.shape[2] ** -0.5))


def of_one_length(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """torch's own attention with the row cut into a batch: what errors are measured against."""
    if len(set(lengths)) > 1:
        raise UnavailableError("sequences of one length only")
    q, k, v = (tensor.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for tensor in (q, k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2).flatten(0, 1)


NAMES: tuple[Name, ...] = ("fa3", "varlen", "cudnn", "flash2", "fa4", "flex", "sdpa")
"""In order of worth; the last is for CPUs."""
KERNELS: dict[str, Kernel] = {name: partial(compute, name) for name in NAMES}
