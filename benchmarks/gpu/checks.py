"""Correctness of kernels: errors against float64, beside those of plain code in bfloat16, and leaks between sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import Kernel, UnavailableError, of_one_length
from benchmarks.gpu.clock import distance
from benchmarks.gpu.heads import head_inputs
from benchmarks.gpu.shapes import Shape
from rlrun.trainer.learning.lm_head import head_statistics
from rlrun.trainer.modeling.packed_attention import row_layout

ATTENTION, FORWARD_SHARE, BACKWARD_SHARE, LEAK = 1e-2, 2.0, 3.0, 2e-3
"""Largest error; largest multiple of the error of plain bfloat16 code, forward and backward; largest difference to a sequence alone."""
LOGPROB, HEAD_GRADIENT = 2e-3, 5e-3
LEAST = 1e-7
"""Errors below this are of no kernel."""


def attention_errors(
    kernel: Kernel, shape: Shape, lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Relative errors of output and gradients on a packed row; a kernel for one length only gets the longest, twice."""
    try:
        _run(kernel, _inputs(shape, lengths, device, dtype), lengths)
    except UnavailableError as error:
        if "one length" not in str(error):
            raise
        lengths = (max(lengths),) * 2
    inputs = _inputs(shape, lengths, device, dtype)
    exact = _each_alone(of_one_length, [tensor.double() for tensor in inputs], lengths)
    plain = [distance(a, b) for a, b in zip(_each_alone(_plain, inputs, lengths), exact, strict=True)]
    packed = _run(kernel, inputs, lengths)
    found = [distance(a, b) for a, b in zip(packed, exact, strict=True)]
    alone = _each_alone(lambda q, k, v, one: kernel(q, k, v, row_layout(one, device)), inputs, lengths)
    leak = distance(packed[0], alone[0])
    shares = [one / max(other, LEAST) for one, other in zip(found, plain, strict=True)]
    right = found[0] <= ATTENTION and leak <= LEAK
    right = right and shares[0] <= FORWARD_SHARE and max(shares[1:]) <= BACKWARD_SHARE
    return {
        "right": right,
        "error": found[0],
        "of bf16's": shares[0],
        "gradients' error": max(found[1:]),
        "of bf16's gradients'": max(shares[1:]),
        "packed against alone": leak,
    }


def head_errors(shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    """The trainer's head against float64 of the same inputs: worst log-probability, relative errors of the gradients."""
    hidden, weight, targets, temperatures = head_inputs(shape, tokens, device)
    coefficients = torch.randn(tokens, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for leaves in ((hidden, weight), [t.detach().double().requires_grad_() for t in (hidden, weight)]):
        if leaves[0].dtype == torch.float64:
            logprobs = _exact_logprobs(leaves[0], leaves[1], targets, temperatures)
        else:
            logprobs = head_statistics(leaves[0], leaves[1], targets, temperatures)[0]
        results.append((logprobs.detach(), *torch.autograd.grad(logprobs, leaves, coefficients.to(logprobs.dtype))))
    worst = float((results[0][0].double() - results[1][0]).abs().max())
    d_hidden, d_weight = (distance(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))
    right = worst <= LOGPROB and max(d_hidden, d_weight) <= HEAD_GRADIENT
    return {"right": right, "log-prob": worst, "d hidden": d_hidden, "d weight": d_weight}


def _exact_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    logits = hidden @ weight.T / temperatures.double()[:, None]
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _inputs(shape: Shape, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator, total = torch.Generator().manual_seed(0), sum(lengths)
    counts = (shape.heads, shape.key_value_heads, shape.key_value_heads, shape.heads)
    return [torch.randn(total, count, shape.head_dim, generator=generator).to(device, dtype) for count in counts]


def _run(kernel: Kernel, inputs: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    output = kernel(q, k, v, row_layout(lengths, inputs[0].device))
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), inputs[3])]


def _each_alone(function: Any, inputs: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Output and gradients of `function(q, k, v, (length,))` on every sequence by itself, end to end."""
    parts = []
    for one in zip(*(tensor.split(list(lengths)) for tensor in inputs), strict=True):
        leaves = [tensor.detach().requires_grad_() for tensor in one[:3]]
        output = function(*leaves, (len(one[0]),))
        parts.append([output.detach(), *torch.autograd.grad(output, leaves, one[3])])
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def _plain(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention of one sequence in single steps, each rounded."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0) / q.shape[2] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
