"""CPU stand-ins of the packages' and torch's flash kernels, with their signatures and operations.

Backward passes follow the kernels: they use the given `lse` for probabilities, and the sum of gradient times output per
query.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

CALLS: Counter[str] = Counter()
"""Number of forward passes per kernel."""
SEEN: dict[str, dict[str, Any]] = {}
"""Arguments of the last call per kernel."""


def _parts(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
    queries, keys = ([slice(*pair) for pair in pairwise(ends.tolist())] for ends in (query_ends, key_ends))
    return list(zip(queries, keys, strict=True))


def _scores(q: Tensor, k: Tensor, scale: float, left: int, softcap: float) -> tuple[Tensor, Tensor]:
    """Return the masked scores of one segment, `[heads, L, K]`, and the derivative of the cap."""
    found = q.transpose(0, 1) @ k.transpose(0, 1).transpose(1, 2) * scale
    slope = torch.ones_like(found)
    if softcap:
        bent = torch.tanh(found / softcap)
        found, slope = softcap * bent, 1 - bent**2
    behind = len(k) - len(q)
    distance = torch.arange(len(q))[:, None] + behind - torch.arange(len(k))[None]
    hidden = (distance < 0) | ((distance > left) if left >= 0 else torch.zeros_like(distance).bool())
    return found.masked_fill(hidden, -torch.inf), slope


def _wide(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, scale: float, left: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return output `[T, heads, D]` and lse `[heads, T]` in float32."""
    outputs, sums = [], []
    for rows, columns in _parts(query_ends, key_ends):
        key, value = (_wide(tensor[columns], q.shape[1]) for tensor in (k, v))
        scores, _ = _scores(q[rows], key, scale, left, softcap)
        outputs.append((scores.softmax(-1) @ value.transpose(0, 1)).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


def backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    lse: Tensor,
    ends: tuple[Tensor, Tensor],
    scale: float,
    left: int,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs."""
    q, k, v = inputs
    found = [torch.zeros_like(tensor) for tensor in inputs]
    per_query = (gradient * output).sum(-1).T
    for rows, columns in _parts(*ends):
        key, value = (_wide(tensor[columns], q.shape[1]) for tensor in (k, v))
        scores, slope = _scores(q[rows], key, scale, left, softcap)
        p = (scores - lse[:, rows, None]).exp()
        g = gradient[rows].transpose(0, 1)
        ds = p * (g @ value.transpose(0, 1).transpose(1, 2) - per_query[:, rows, None]) * slope * scale
        found[0][rows] = (ds @ key.transpose(0, 1)).transpose(0, 1)
        for place, wide in ((1, ds.transpose(1, 2) @ q[rows].transpose(0, 1)), (2, p.transpose(1, 2) @ g)):
            found[place][columns] = wide.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(found)


def _note(kernel: str, **arguments: Any) -> None:
    CALLS[kernel] += 1
    SEEN[kernel] = arguments


def _check_ends(query_ends: Tensor, key_ends: Tensor, longest_query: int, longest_key: int) -> None:
    if torch.compiler.is_compiling():
        return
    for ends, longest in ((query_ends, longest_query), (key_ends, longest_key)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert int(ends[0]) == 0
        assert type(longest) is int
        assert longest == int(ends.diff().max())


def _registered(kernel: str, name: str) -> Any:
    """Register a forward pass as a torch operation, like the packages do, and return a differentiable function of it."""

    @torch.library.custom_op(name, mutates_args=())
    def operation(
        q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, scale: float, left: int, softcap: float
    ) -> tuple[Tensor, Tensor]:
        CALLS[kernel] += 1
        return forward(q, k, v, query_ends, key_ends, scale, left, softcap)

    @operation.register_fake
    def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]))

    @torch.library.custom_op(name.replace("forward", "backward"), mutates_args=())
    def operation_backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        lse: Tensor,
        query_ends: Tensor,
        key_ends: Tensor,
        scale: float,
        left: int,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(gradient, (q, k, v), output, lse, (query_ends, key_ends), scale, left, softcap)
        return dq, dk, dv

    @operation_backward.register_fake
    def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            output, lse = operation(q, k, v, *rest)
            ctx.save_for_backward(q, k, v, output, lse)
            ctx.rest = rest
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            q, k, v, output, lse = ctx.saved_tensors
            return (*operation_backward(gradient, q, k, v, output, lse, *ctx.rest), *([None] * 5))

    return Function


_FLASH2 = _registered("flash2", "flash_attn::_flash_attn_varlen_forward")


@torch.library.custom_op("flash_attn_3::fwd", mutates_args=())
def _fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of flash-attn-3 3.0.0 for training; like the package, without shapes for a compiler."""
    assert num_splits == 1, "what a sequence gets would depend on the others of its row"
    ends = _fa3_checked(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_size_right)
    assert softmax_scale is not None
    _note("fa3", softmax_scale=softmax_scale, window_size=(window_size_left, window_size_right), softcap=softcap)
    output, lse = forward(q, k, v, *ends, softmax_scale, window_size_left, softcap)
    return output, lse, q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("flash_attn_3::bwd", mutates_args=("dq", "dk", "dv"))
def _fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Write the gradients into the given tensors."""
    assert softmax_lse.is_contiguous()
    assert dout.is_contiguous()
    ends = _fa3_checked(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_size_right)
    assert softmax_scale is not None
    found = backward(dout, (q, k, v), out, softmax_lse, ends, softmax_scale, window_size_left, softcap)
    for given, gradient in zip((dq, dk, dv), found, strict=True):
        assert given is not None
        given.copy_(gradient)
    return softmax_lse.clone()


def _fa3_checked(
    query_ends: Tensor | None,
    key_ends: Tensor | None,
    longest_query: int | None,
    longest_key: int | None,
    causal: bool,
    right: int,
) -> tuple[Tensor, Tensor]:
    assert causal
    assert right == 0
    assert query_ends is not None
    assert key_ends is not None
    assert longest_query is not None
    assert longest_key is not None
    _check_ends(query_ends, key_ends, longest_query, longest_key)
    return query_ends, key_ends


def _flash2_function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:
    """Signature of flash-attn 2.8."""
    return _checked("flash2", _FLASH2, locals())


def _checked(kernel: str, function: Any, given: dict[str, Any]) -> Tensor:
    _check_ends(given["cu_seqlens_q"], given["cu_seqlens_k"], given["max_seqlen_q"], given["max_seqlen_k"])
    assert given["causal"] is True
    left, right = given["window_size"]
    assert right == 0
    if not torch.compiler.is_compiling():
        SEEN[kernel] = {name: given[name] for name in ("softmax_scale", "window_size", "softcap")}
    ends = (given["cu_seqlens_q"], given["cu_seqlens_k"])
    found: Tensor = function.apply(
        given["q"], given["k"], given["v"], *ends, given["softmax_scale"], left, given["softcap"]
    )
    return found


def _fa4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor | None, ...]:
    """Training arguments of flash-attn-4 4.0.0b, and the five results of b36."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert return_lse
    _check_ends(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    left = _fa4_left(causal, window_size_left, window_size_right)
    _note("fa4", softmax_scale=softmax_scale, window_size_left=window_size_left, causal=causal)
    assert softmax_scale is not None
    return *forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, left), None, None, None


def _fa4_left(causal: bool, left: int | None, right: int | None) -> int:
    """Return the left window; None is an open end, and `causal` implies a window."""
    assert causal == (left is None)
    assert right == (None if causal else 0)
    return -1 if left is None else left


def _fa4_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    assert lse.is_contiguous()
    assert softmax_scale is not None
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    left = _fa4_left(causal, window_size_left, window_size_right)
    return backward(dout, (q, k, v), out, lse, (cu_seqlens_q, cu_seqlens_k), softmax_scale, left)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, longest_q: int, longest_k: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale, window = rest[:3]
    assert causal == (list(window) == [-1, 0])
    _check_ends(query_ends, key_ends, longest_q, longest_k)
    _note("varlen", softmax_scale=scale, window_size=tuple(window), enable_gqa=rest[3] if len(rest) > 3 else False)
    return *forward(q, k, v, query_ends, key_ends, scale, window[0]), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    ends, scale, window = (rest[0], rest[1]), rest[6], rest[7]
    return backward(gradient, (q, k, v), out, lse, ends, scale, window[0])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install all stand-ins at the trainer's import paths and reset the counters."""
    CALLS.clear()
    SEEN.clear()
    monkeypatch.setitem(varlen._varlen_attn._backend_fns, None, _varlen_forward)
    monkeypatch.setitem(varlen._varlen_attn_backward._backend_fns, None, _varlen_backward)
    package("flash_attn_interface", monkeypatch, __version__="3.0.0")
    package("flash_attn", monkeypatch, flash_attn_varlen_func=_flash2_function, __version__="2.8.3")
    package("flash_attn.cute", monkeypatch)
    package("flash_attn.cute.interface", monkeypatch, _flash_attn_fwd=_fa4_forward, _flash_attn_bwd=_fa4_backward)


def package(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    """Install a module of that name for the duration of a test."""
    module = ModuleType(name)
    for attribute, value in content.items():
        setattr(module, attribute, value)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
