"""FlashAttention of torch (`varlen`) and of the packages of FlashAttention 2 (`flash2`), 3 (`fa3`) and 4 (`fa4`), in one table.

Packages, their detection, devices, head sizes and number formats of the kernels are in `rlrun.fit.attention_kernels.BACKENDS`.

**Operations.** `fa3` and `fa4` are operations of torch, `rlrun::flash_attention_3` and `rlrun::flash_attention_4`, with fake
implementations and a gradient. FlashAttention 3 registers its own operations, but most versions have no fake implementations for the
compiler, and the arguments of its Python functions differ between versions. FlashAttention 4 has only Python functions, which are
invisible to compiled code and activation checkpointing. `flash2` is differentiable, and its forward pass is an operation of torch.

**Sinks** do not need a special kernel. With `lse` the logarithm of the sum of exponentials over the keys and `s` a head's sink, attention
with a sink has `lse' = log(exp(lse) + exp(s))` and `output' = output * exp(lse - lse')`. The backward pass of a flash kernel recomputes
`P = exp(scores - lse)` and needs from the forward pass only `sum(gradient * output)` per query. With `lse'` and `output'` it therefore
computes the gradients of queries, keys and values with the sink. The gradient of the sink is `-exp(s - lse') * sum(gradient * output')`,
summed over the queries. All these kernels drop gradients of `lse`, so sinks computed from `lse` by autograd would get wrong gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor

from rlrun.fit.attention_kernels import FA3, FA4, FLASH2, Kernel
from rlrun.trainer.modeling.attention.packed_layout import Scores, Segments

_NAMES_GROUPED_HEADS = any(
    argument.name == "enable_gqa" for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments
)
"""Whether torch's operation has an argument for fewer key-value heads; up to 2.11 it accepts them without the argument."""


class Packed(NamedTuple):
    """Layout of a packed row and options of its attention, in the order of the operations' arguments."""

    query_ends: Tensor
    """Cumulative numbers of queries from 0, `[N + 1]` int32."""
    key_ends: Tensor
    """Cumulative numbers of keys from 0, `[N + 1]` int32."""
    longest_query: int
    longest_key: int
    scale: float
    left: int
    """Number of visible keys before a query's position; -1: all."""
    softcap: float
    """Bound of scores by a scaled tanh; 0: unbounded."""


class Attended(NamedTuple):
    """Inputs and results of a forward pass, for its backward pass."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    """Output `[T, heads, D]`."""
    lse: Tensor
    """Logarithm of the sum of exponentials over the keys, `[heads, T]` float32."""


Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""
Forward = Callable[[Tensor, Tensor, Tensor, Packed], tuple[Tensor, Tensor]]
"""Function of query, key, value and the row; returns the output and lse of `Attended`."""
Backward = Callable[[Tensor, Attended, Packed], Gradients]
"""Function of the output's gradient, the forward pass and the row."""


class FlashKernel(Protocol):
    """One kernel of the table."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Compute attention; for the arguments see `compute.attend`."""


@dataclass(frozen=True)
class OperationPair:
    """Kernel that consists of a forward and a backward operation."""

    forward: Forward
    """Differentiable if the scores have no sinks."""
    backward: Backward

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Compute attention, with sinks on top of the operations; see the module's docstring."""
        packed = _packed_row(segments, scores)
        if scores.sinks is None:
            return self.forward(query, key, value, packed)[0]
        return _Sinks.apply(query, key, value, scores.sinks, (self, packed))


@dataclass(frozen=True)
class PackageFunction:
    """Kernel that is the differentiable function of a package, without sinks."""

    run: Callable[[Tensor, Tensor, Tensor, Packed], Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Compute attention; for the arguments see `compute.attend`."""
        return self.run(query, key, value, _packed_row(segments, scores))


def _packed_row(segments: Segments, scores: Scores) -> Packed:
    return Packed(
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scores.scale,
        -1 if scores.window is None else scores.window - 1,  # our window includes the token itself
        scores.softcap or 0.0,
    )


class _SinksContext(Protocol):
    """Context of attention with sinks in the autograd graph."""

    saved_tensors: tuple[Tensor, ...]
    constant: tuple[OperationPair, Packed]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


class _Sinks(torch.autograd.Function):
    """Attention with sinks on top of operations without sinks; see the module's docstring."""

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor, Tensor, tuple[OperationPair, Packed]], Tensor]]

    @staticmethod
    def forward(
        ctx: _SinksContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        constant: tuple[OperationPair, Packed],
    ) -> Tensor:
        pair, packed = constant
        output, lse = pair.forward(query, key, value, packed)
        column = sinks.float()[:, None]
        with_sink = torch.logaddexp(lse, column)
        output = (output.float() * (lse - with_sink).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, with_sink)
        ctx.constant = constant
        return output

    @staticmethod
    def backward(ctx: _SinksContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        pair, packed = ctx.constant
        gradient = gradients[0].contiguous()
        of_inputs = pair.backward(gradient, Attended(query, key, value, output, lse), packed)
        per_query = (gradient.float() * output.float()).sum(-1).T
        of_sinks = -((sinks.float()[:, None] - lse).exp() * per_query).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None


def _varlen_forward(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _NAMES_GROUPED_HEADS else {}
    output, lse, _ = torch.ops.torch_attn._varlen_attn(
        query,
        key,
        value,
        packed.query_ends,
        packed.key_ends,
        packed.longest_query,
        packed.longest_key,
        is_causal=packed.left < 0,  # a window is causal by its closed right end
        scale=packed.scale,
        window_size=[packed.left, 0],
        **grouped,
    )
    return output, lse


def _varlen_backward(gradient: Tensor, attended: Attended, packed: Packed) -> Gradients:
    unused = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # random state of the unused dropout
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        gradient,
        *attended,
        packed.query_ends,
        packed.key_ends,
        packed.longest_query,
        packed.longest_key,
        packed.left < 0,
        unused,
        scale=packed.scale,
        window_size=[packed.left, 0],
    )
    return dq, dk, dv


def _fa3_options(packed: Packed) -> dict[str, Tensor | float | int | bool]:
    """Return the common keyword arguments of both operations. Causal attention closes a window's right end; -1 leaves the left end open."""
    return {
        "cu_seqlens_q": packed.query_ends,
        "cu_seqlens_k": packed.key_ends,
        "max_seqlen_q": packed.longest_query,
        "max_seqlen_k": packed.longest_key,
        "softmax_scale": packed.scale,
        "is_causal": True,
        "window_size_left": packed.left,
        "window_size_right": 0,
        "softcap": packed.softcap,
    }


def _fa3_forward(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    importlib.import_module(FA3.module)  # the import registers the operations
    # With one split the result of a sequence does not depend on other sequences of the row.
    output, lse, *_ = torch.ops.flash_attn_3.fwd(query, key, value, num_splits=1, **_fa3_options(packed))
    return output, lse


def _fa3_backward(gradient: Tensor, attended: Attended, packed: Packed) -> Gradients:
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in attended[:3])
    torch.ops.flash_attn_3.bwd(
        gradient.contiguous(),
        attended.query,
        attended.key,
        attended.value,
        attended.output,
        attended.lse.contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_fa3_options(packed),
    )
    return dq, dk, dv


def _fa4_options(packed: Packed) -> dict[str, Tensor | float | int | bool | None]:
    """Return the common keyword arguments of both functions. None is an open end of a window; causal attention excludes a window."""
    return {
        "cu_seqlens_q": packed.query_ends,
        "cu_seqlens_k": packed.key_ends,
        "softmax_scale": packed.scale,
        "causal": packed.left < 0,
        "window_size_left": None if packed.left < 0 else packed.left,
        "window_size_right": None if packed.left < 0 else 0,
    }


def _fa4_forward(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    package = importlib.import_module(FA4.module)
    # Betas before b16 return two values, b20 four and b36 five.
    output, lse, *_ = package._flash_attn_fwd(
        query,
        key,
        value,
        max_seqlen_q=packed.longest_query,
        max_seqlen_k=packed.longest_key,
        return_lse=True,
        **_fa4_options(packed),
    )
    expected = (query.shape[1], query.shape[0])
    if lse.shape != expected:
        # `_Sinks` and the backward pass read `lse` by heads, so another order gives wrong gradients without an error.
        raise RuntimeError(
            f"{FA4.module} returned lse of shape {list(lse.shape)} instead of [heads, tokens] {list(expected)}; "
            f"install the tested release ({FA4.install}), or set attention to another kernel"
        )
    return output.contiguous(), lse.contiguous()


def _fa4_backward(gradient: Tensor, attended: Attended, packed: Packed) -> Gradients:
    package = importlib.import_module(FA4.module)
    dq, dk, dv, *_ = package._flash_attn_bwd(
        attended.query,
        attended.key,
        attended.value,
        attended.output,
        gradient,
        attended.lse.contiguous(),
        **_fa4_options(packed),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# An operation of torch takes tensors and numbers only, so that its schema has an argument for each field of `Packed` and `Attended`. The
# schemas are written here, and not taken from annotations, so that the functions below can take the fields as one value.
_PACKED_FIELDS = "Tensor query_ends, Tensor key_ends, SymInt longest_query, SymInt longest_key, float scale, SymInt left, float softcap"
_FORWARD_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {_PACKED_FIELDS}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"{_PACKED_FIELDS}) -> (Tensor, Tensor, Tensor)"
)
Operation = Callable[..., Any]
"""Operation of torch with the arguments of a schema."""


class _OperationContext(Protocol):
    """Context of an operation in the autograd graph."""

    saved_tensors: tuple[Tensor, ...]
    options: tuple[int | float, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


def register_operations(name: str, forward: Forward, backward: Backward) -> tuple[Operation, Operation]:
    """Register a kernel's forward and backward pass with torch, with fake implementations and a gradient.

    Args:
        name: name of the forward operation in the namespace `rlrun`.
        forward: forward pass; its results are contiguous.
        backward: backward pass; its results are contiguous.
    """

    # `Any`: torch passes the arguments of the schema one by one.
    def run_forward(query: Tensor, key: Tensor, value: Tensor, *packed: Any) -> tuple[Tensor, Tensor]:
        return forward(query, key, value, Packed(*packed))

    def run_backward(gradient: Tensor, *given: Any) -> Gradients:
        return backward(gradient, Attended(*given[:5]), Packed(*given[5:]))

    def save(ctx: _OperationContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.options = inputs[5:]

    def differentiate(ctx: _OperationContext, gradient: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_ends, key_ends, output, lse = ctx.saved_tensors
        found = backward_operation(gradient, query, key, value, output, lse, query_ends, key_ends, *ctx.options)
        return *found, *[None] * len(Packed._fields)

    register = torch.library.custom_op
    forward_operation = register(f"rlrun::{name}", run_forward, mutates_args=(), schema=_FORWARD_SCHEMA)
    backward_operation = register(f"rlrun::{name}_backward", run_backward, mutates_args=(), schema=_BACKWARD_SCHEMA)
    forward_operation.register_fake(_fake_forward)
    backward_operation.register_fake(_fake_backward)
    forward_operation.register_autograd(differentiate, setup_context=save)
    return forward_operation, backward_operation


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *packed: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32),
    )


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Gradients:
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value))
    return dq, dk, dv


def _operation_pair(name: str, forward: Forward, backward: Backward) -> OperationPair:
    """Register the operations of a kernel and return the kernel that calls them."""
    # Compiled code and activation checkpointing see only operations, so the calls go through torch
    # and not directly to the package's functions.
    run_forward, run_backward = register_operations(name, forward, backward)
    return OperationPair(
        lambda query, key, value, packed: run_forward(query, key, value, *packed),
        lambda gradient, attended, packed: run_backward(gradient, *attended, *packed),
    )


_loaded: list[Callable[..., Tensor | tuple[Tensor, ...]]] = []
"""Function of FlashAttention 2's package. The compiler can trace a look-up in a list, but not an import."""


def load_package(kernel: Kernel) -> None:
    """Import the package of a kernel before its first call; no effect for other kernels."""
    if kernel == "flash2":
        (name,) = FLASH2.functions
        _loaded[:] = [getattr(importlib.import_module(FLASH2.module), name)]


def _flash2(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    if not _loaded:
        load_package("flash2")
    found = _loaded[0](
        query,
        key,
        value,
        cu_seqlens_q=packed.query_ends,
        cu_seqlens_k=packed.key_ends,
        max_seqlen_q=packed.longest_query,
        max_seqlen_k=packed.longest_key,
        softmax_scale=packed.scale,
        causal=True,
        window_size=(packed.left, 0),
        softcap=packed.softcap,
    )
    return found[0] if isinstance(found, tuple) else found  # versions of 2024 also return sums of exponentials


FLASH_KERNELS: Mapping[Kernel, FlashKernel] = {
    "fa3": _operation_pair("flash_attention_3", _fa3_forward, _fa3_backward),
    "fa4": _operation_pair("flash_attention_4", _fa4_forward, _fa4_backward),
    "flash2": PackageFunction(_flash2),
    "varlen": OperationPair(_varlen_forward, _varlen_backward),
}
"""Kernels by name; each name has a row in `rlrun.fit.attention_kernels.BACKENDS`."""
