"""LM head fused with the computation of log-probability and entropy, so that the logits of a row never exist at once.

The logits `[K, V]` of a row are the largest tensor of a step. Here they exist in float32 for a chunk of tokens at a time. The first
chunks are kept for the backward pass, up to a fixed number of bytes; the others are recomputed there. `head.fused` is the fast path for
gradients of log-probabilities. This module has the general path: for an entropy with a gradient, a bias, a soft cap, and dtypes without a
kernel. With z = logits / temperature, p = softmax(z), chosen token y and entropy H:

    d log p_y / d z_j = 1[j = y] - p_j            d H / d z_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from rlrun.trainer.learning.head.fused import FusedHead, Plan, add_product, float32_product, fused_kernel

Entropy = Literal["none", "value", "gradient"]
"""Requested part of the entropy: nothing (may return 0), its value, or value and gradient."""
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes of one chunk of float32 logits, by device; about three chunks exist at a time."""
KEPT_BYTES = {"cpu": 320 * 2**20}
"""Limit of bytes of log-probabilities kept for the backward pass. On CPU recomputing the matrix product costs more than this memory."""
LEFT_SHARE = 6
"""Inverse share of a GPU's memory that kept residuals must leave free for the backward pass."""


@dataclass(frozen=True)
class LogitOptions:
    """Changes of the logits between head and temperature."""

    bias: Tensor | None = None
    """Bias of the head, `[V]`, added to the logits."""
    softcap: float | None = None
    """Soft cap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118, 2.2)."""


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    options: LogitOptions = LogitOptions(),
    chunk_tokens: int | None = None,
    entropy: Entropy = "value",
    waits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute statistics of `softmax((hidden @ weight.T + bias) / temperatures)` without all logits at once.

    Args:
        hidden: hidden states, `[K, D]` float32 or bfloat16.
        weight: weight of the head, `[V, D]` of the same dtype.
        targets: chosen tokens, `[K]` int64.
        temperatures: sampling temperatures, `[K]` fp32, greater than 0.
        options: changes of the logits. Default: none.
        chunk_tokens: tokens per chunk. Default: the number whose logits take `CHUNK_BYTES`.
        entropy: requested part of the entropy.
        waits: true if other rows run forward before this row's backward pass; on a GPU nothing is kept for this row then.

    Returns:
        Log-probability of each target and entropy in nats, `[K]` fp32 each, differentiable in `hidden`, `weight` and `bias`; the entropy
        only for `entropy="gradient"`.
    """
    bias, softcap = options.bias, options.softcap
    if bias is None and softcap is None and entropy != "gradient":
        plan = _plan_head(hidden, weight, chunk_tokens, entropy=entropy != "none", waits=waits)
        if plan is not None:
            logprobs, found, _ = FusedHead.apply(hidden, weight, targets, temperatures, None, plan)
            return logprobs, found
    if chunk_tokens is None:
        chunk_tokens = _chunk_tokens(hidden, weight)
    logprobs, found = _HeadStatistics.apply(hidden, weight, bias, targets, temperatures, softcap, chunk_tokens)
    return logprobs, found if entropy == "gradient" else found.detach()


def weighted_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    coefficients: Tensor,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the sum of `coefficients * logprobs` and its gradients in one pass over the logits, without keeping or recomputing them.

    Args:
        hidden, weight, targets, temperatures, chunk_tokens: see `head_statistics`.
        coefficients: constant factors, `[K]` fp32.

    Returns:
        Differentiable scalar sum, and log-probabilities and entropies as constants, `[K]` fp32 each; or None if no kernel supports the
        inputs.
    """
    plan = _plan_head(hidden, weight, chunk_tokens, entropy=True)
    if plan is None:
        return None
    logprobs, entropy, total = FusedHead.apply(hidden, weight, targets, temperatures, coefficients, plan)
    return total, logprobs, entropy


def _plan_head(
    hidden: Tensor, weight: Tensor, chunk_tokens: int | None, *, entropy: bool, waits: bool = False
) -> Plan | None:
    kernel = fused_kernel(hidden)
    if kernel is None or weight.dtype != hidden.dtype:
        return None
    device = hidden.device.type
    # The fused path has the logits and one residual in the weight's dtype. In bfloat16, chunks of twice the size take no more memory than
    # the general path's three chunks, and the weight's gradient is accumulated half as often.
    larger = 2 if device == "cuda" and hidden.dtype != torch.float32 else 1
    tokens = chunk_tokens or larger * _chunk_tokens(hidden, weight)
    return Plan(kernel, tokens, _kept_bytes(hidden.device, waits=waits), entropy, reuses_memory=device == "cpu")


def _kept_bytes(device: torch.device, *, waits: bool = False) -> int:
    """Return the bytes available for residuals that are kept for the backward pass.

    On a GPU this is the free memory at this moment, after all activations are allocated; longer rows leave less, so the memory is never
    exhausted. A row that waits for other rows (in a pipeline) gets 0, because their activations are not allocated yet.
    """
    if device.type != "cuda":
        return KEPT_BYTES.get(device.type, 0)
    if waits:
        return 0
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch's allocator holds without a tensor is available too; CUDA reports it as
    # used.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(int(free + unused - total // LEFT_SHARE), 0)


def _chunk_tokens(hidden: Tensor, weight: Tensor) -> int:
    vocabulary: int = weight.shape[0]
    return max(CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"]) // (4 * vocabulary), 1)


def logits_statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy from existing logits `[K, V]`."""
    distribution = (logits.float() / temperatures[:, None]).log_softmax(-1)
    chosen = -nn.functional.nll_loss(distribution, targets, reduction="none")
    return chosen, -(distribution.exp() * distribution).sum(-1)


class _HeadContext(Protocol):
    """Context of `_HeadStatistics` in the autograd graph."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]
    """Saved tensors; the third, the bias, may be None."""
    kept: dict[int, Tensor]
    """Log-probabilities of chunks by their first token."""
    softcap: float | None
    chunk_tokens: int

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward pass."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether missing gradients are zeros instead of None."""


class _HeadStatistics(torch.autograd.Function):
    apply: ClassVar[Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, float | None, int], tuple[Tensor, Tensor]]]

    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        softcap: float | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = temperatures.new_empty(len(hidden)), temperatures.new_empty(len(hidden))
        ctx.kept = {}
        left = KEPT_BYTES.get(hidden.device.type, 0) if any(ctx.needs_input_grad) else 0
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            log_p, slope = _log_softmax(hidden[part], weight, bias, temperatures[part], softcap)
            left -= log_p.nbytes
            # With a soft cap the backward pass needs the derivative as well, so these chunks are
            # recomputed.
            if slope is None and left >= 0:
                ctx.kept[start] = log_p
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
            del log_p  # free the chunk before the next one is allocated
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, entropy)
        ctx.softcap, ctx.chunk_tokens = softcap, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _HeadContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            # Removed while it is used: `_d_logits` overwrites it, and its memory is free for the
            # next chunk.
            log_p, slope = ctx.kept.pop(start, None), None
            if log_p is None:
                log_p, slope = _log_softmax(hidden[part], weight, bias, temperatures[part], ctx.softcap)
            scale = temperatures[part, None].reciprocal()  # scaling the incoming gradient scales the whole row
            d_logits = _d_logits(
                log_p,
                targets[part],
                None if of_logprobs is None else of_logprobs[part, None] * scale,
                None if of_entropy is None else of_entropy[part, None] * scale,
                entropy[part, None],
            )
            if slope is not None:
                d_logits.mul_(slope)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                add_product(d_weight, d_logits.T, hidden[part])
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probabilities of a chunk, `[C, V]` fp32, and the derivative of the soft cap, or None."""
    # Equally exact, and divides K·D instead of K·V numbers.
    if bias is None and softcap is None and hidden.dtype == torch.float32:
        return (hidden / temperatures[:, None] @ weight.T).log_softmax(-1), None
    logits = float32_product(hidden, weight.T)
    if bias is not None:
        logits += bias
    slope = None
    if softcap is not None:
        bounded = logits.div_(softcap).tanh_()
        slope = 1 - bounded.square()
        logits = bounded * softcap
    return logits.div_(temperatures[:, None]).log_softmax(-1), slope


def _d_logits(
    log_p: Tensor, targets: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Compute the gradient on the logits. Both incoming gradients are already divided by the temperature; `log_p` is overwritten."""
    if of_entropy is None:
        gradient = log_p.exp_().mul_(0 if of_logprobs is None else -of_logprobs)
    else:
        p = log_p.exp()
        factor = log_p.add_(entropy).mul_(-of_entropy)
        gradient = p.mul_(factor if of_logprobs is None else factor.sub_(of_logprobs))
    if of_logprobs is not None:
        gradient.scatter_add_(1, targets[:, None], of_logprobs)
    return gradient


@dataclass(frozen=True)
class Head:
    """Head of a causal LM on its decoder's last hidden states: `cap(scale * linear(hidden))`."""

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    """Soft cap, or None for the identity; with a soft cap, `scale` is 1."""
    waits: bool = False
    """Other rows run before the backward pass, see `head_statistics`."""

    def statistics(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: Entropy = "value"
    ) -> tuple[Tensor, Tensor]:
        """Compute `head_statistics` of hidden states `[K, D]`; FSDP must have gathered the head's parameters."""
        weight = self.linear.weight
        if isinstance(weight, DTensor):  # tensor parallel: the hooks of the head join the ranks' parts
            logits = self.linear(hidden[None])[0].float()
            if self.softcap is not None:
                logits = self.softcap * (logits / self.softcap).tanh()
            return logits_statistics(logits, targets, temperatures / self.scale)
        return head_statistics(
            hidden,
            weight,
            targets,
            temperatures / self.scale,
            options=LogitOptions(self.linear.bias, self.softcap),
            entropy=entropy,
            waits=self.waits,
        )

    def weighted_logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, coefficients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute `weighted_logprobs` of hidden states `[K, D]`, or return None if no kernel supports this head."""
        weight = self.linear.weight
        if isinstance(weight, DTensor) or self.linear.bias is not None or self.softcap is not None:
            return None
        return weighted_logprobs(hidden, weight, targets, temperatures / self.scale, coefficients)


def find_head(model: Any) -> Head | None:
    """Find the head of a Hugging Face causal LM; return None if the model transforms its logits in an unknown way.

    The function calls the model's `forward` once, with a decoder that returns zeros and a head that returns known logits, and compares
    the result.
    """
    linear, decoder = model.get_output_embeddings(), model.get_decoder()
    if (
        type(linear) is not nn.Linear or decoder is model or decoder is linear
    ):  # ModernBERT's head has the decoder's name
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    logits = torch.linspace(-40, 40, 9)[None, None]
    ids = torch.zeros(1, 1, dtype=torch.long)
    nothing = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 1, linear.in_features))
    try:
        with (
            torch.no_grad(),
            _forward_is(decoder, lambda *_, **__: nothing),
            _forward_is(linear, lambda _: logits.clone()),
        ):
            found = type(model).forward(model, input_ids=ids, use_cache=False).logits
    except Exception:
        return None
    if found.shape != logits.shape:
        return None
    if cap is not None:
        return Head(linear, softcap=cap) if torch.allclose(found, cap * (logits / cap).tanh()) else None
    scale = float(found[0, 0, -1] / logits[0, 0, -1])
    return Head(linear, scale=scale) if scale > 0 and torch.allclose(found, scale * logits) else None


@contextmanager
def _forward_is(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of `module` and disable its hooks, such as those of tensor parallelism."""
    changed = {"forward": replacement, "_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
    before = {name: module.__dict__[name] for name in changed if name in module.__dict__}
    module.__dict__.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del module.__dict__[name]
        module.__dict__.update(before)
