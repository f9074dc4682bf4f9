"""Attention kernels, compared with the definition for every option of the table, and the arguments passed to their
packages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlrun.fit.attention_kernels import BACKENDS, FA4, Feature, Kernel
from rlrun.trainer.modeling.attention import compute, flash
from rlrun.trainer.modeling.attention.compute import FUNCTIONS, attend
from rlrun.trainer.modeling.attention.packed_layout import Scores, Segments, dense_attention, row_layout
from tests.tensors.attention import stand_ins

CPU = torch.device("cpu")
LENGTHS = (5, 17, 3, 9, 1, 16)
HEADS, KEY_VALUE_HEADS, SIZE = 4, 2, 8
OPTIONS: dict[Feature, Scores] = {
    "window": Scores(0.3, window=4),
    "softcap": Scores(0.3, softcap=0.5),
    "sinks": Scores(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
PLAIN = Scores(0.3)
ALL = Scores(0.3, window=4, softcap=0.5, sinks=OPTIONS["sinks"].sinks)
FLASH: tuple[Kernel, ...] = ("fa3", "fa4", "flash2", "varlen")


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


ROW = row_layout(LENGTHS, CPU).segments
PART = Segments((2, 5, 1), (9, 5, 4), ends((2, 5, 1)), ends((9, 5, 4)))
"""Segments of one rank: some queries of a sequence, and all keys that they attend to."""


def inputs(segments: Segments, *, grads: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (sum(segments.queries), HEADS),
        (sum(segments.keys), KEY_VALUE_HEADS),
        (sum(segments.keys), KEY_VALUE_HEADS),
    ]
    return [torch.randn(*shape, SIZE, generator=generator).requires_grad_(grads) for shape in shapes]


def defined(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute each segment separately by the definition."""
    groups, parts = q.shape[1] // k.shape[1], []
    for one in zip(q.split(segments.queries), k.split(segments.keys), v.split(segments.keys), strict=True):
        query, key, value = (tensor.transpose(0, 1) for tensor in one)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        parts.append(dense_attention(query, key, value, scores).transpose(0, 1))
    return torch.cat(parts)


def offered() -> Iterator[tuple[Kernel, Scores, Segments]]:
    for kernel, backend in BACKENDS.items():
        if kernel == "flex":
            continue
        given = [PLAIN, *(scores for feature, scores in OPTIONS.items() if feature in backend.features)]
        if {"window", "softcap", "sinks"} <= backend.features:
            given.append(ALL)
        elif {"window", "softcap"} <= backend.features:
            given.append(replace(ALL, sinks=None))
        elif {"window", "sinks"} <= backend.features:
            given.append(replace(ALL, softcap=None))
        for scores in given:
            yield kernel, scores, ROW
            if "context" in backend.features:
                yield kernel, scores, PART


def results(kernel: Kernel | None, segments: Segments, scores: Scores) -> list[Tensor]:
    """Return the output and the gradients of queries, keys, values and sinks."""
    leaves = inputs(segments)
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks.clone().requires_grad_())
        leaves.append(scores.sinks)
    q, k, v = leaves[:3]
    found = defined(q, k, v, segments, scores) if kernel is None else attend(kernel, q, k, v, segments, scores)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return [found, *torch.autograd.grad((found * weights).sum(), leaves)]


@pytest.mark.parametrize(("kernel", "scores", "segments"), list(offered()))
def test_kernel_supports_every_option_of_its_table(
    kernel: Kernel, scores: Scores, segments: Segments, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "cudnn":  # a CPU has another backend for the same call
        monkeypatch.setattr(compute, "SDPBackend", type("Any", (), {"CUDNN_ATTENTION": compute.SDPBackend.MATH}))
    for found, expected in zip(results(kernel, segments, scores), results(None, segments, scores), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert kernel not in FLASH or {kernel: 1} == stand_ins.CALLS


@pytest.mark.parametrize("scores", [PLAIN, OPTIONS["window"], OPTIONS["sinks"]], ids=["plain", "window", "sinks"])
@pytest.mark.parametrize(("forward_results", "backward_results"), [(2, 3), (4, 3), (5, 4)])
def test_flash_attention_4_ignores_further_results(
    forward_results: int, backward_results: int, scores: Scores, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.0.0b15 returns two values forward, b20 four and b36 five; b36 may return a fourth gradient."""
    package = sys.modules[FA4.module]
    for name, count in (("_flash_attn_fwd", forward_results), ("_flash_attn_bwd", backward_results)):
        monkeypatch.setattr(package, name, _with_results(getattr(package, name), count))
    for found, expected in zip(results("fa4", ROW, scores), results("sdpa", ROW, scores), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def _with_results(function: Callable[..., tuple[Any, ...]], count: int) -> Callable[..., tuple[Any, ...]]:
    """Return the function with `count` results; the additional ones are not tensors, so that no use of them succeeds."""

    def call(*inputs: Any, **options: Any) -> tuple[Any, ...]:
        return (*function(*inputs, **options), *[object()] * count)[:count]

    return call


def test_sums_of_exponentials_of_another_shape_are_refused(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention of 4.0.0b36 returns them as `[tokens, heads]`."""
    package = sys.modules[FA4.module]
    original = package._flash_attn_fwd

    def transposed(*inputs: Any, **options: Any) -> tuple[Any, ...]:
        output, lse, *rest = original(*inputs, **options)
        return output, lse.T, *rest

    monkeypatch.setattr(package, "_flash_attn_fwd", transposed)
    with pytest.raises(RuntimeError, match=r"lse of shape \[51, 4\] instead of \[heads, tokens\] \[4, 51\]; install"):
        results("fa4", ROW, PLAIN)


@pytest.mark.parametrize("scores", [PLAIN, *OPTIONS.values()], ids=str)
@pytest.mark.parametrize("segments", [ROW, PART], ids=["row", "part"])
def test_flex_mask_and_scores_equal_definition(
    scores: Scores, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate flex's functions on whole matrices with gradients, because flex_attention has no backward pass on a
    CPU.
    """

    def whole(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        mask, sizes = given["block_mask"], (query.shape[2], key.shape[2])
        places = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        zero = torch.zeros((), dtype=torch.int64)
        key, value = (tensor.repeat_interleave(HEADS // KEY_VALUE_HEADS, 1) for tensor in (key, value))
        found = query @ key.transpose(2, 3) * given["scale"]
        if given["score_mod"] is not None:
            found = given["score_mod"](found, zero, zero, *places)
        found = found.masked_fill(~mask.mask_mod(zero, zero, *places), -torch.inf)
        output = found.softmax(-1) @ value
        auxiliary = type("Auxiliary", (), {"lse": found.logsumexp(-1)})
        return (output, auxiliary) if "return_aux" in given else output

    monkeypatch.setattr(compute, "_compiled_function", lambda compiled: whole)
    for found, expected in zip(results("flex", segments, scores), results(None, segments, scores), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("scores", [PLAIN, replace(ALL, sinks=None)], ids=["plain", "window and cap"])
def test_flex_attention_runs_on_cpu(scores: Scores) -> None:
    q, k, v = inputs(ROW, grads=False)
    torch.testing.assert_close(
        attend("flex", q, k, v, ROW, scores), defined(q, k, v, ROW, scores), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("window", "expected"), [(None, -1), (1, 0), (4, 3), (17, -1), (400, -1)])
def test_packages_receive_window_cap_and_scale(window: int | None, expected: int, kernels: None) -> None:
    """A model's window includes the token itself; a window of at least the longest sequence (17 tokens) has no effect."""
    q, k, v = inputs(ROW)
    for kernel in FLASH:
        softcap = 0.5 if "softcap" in BACKENDS[kernel].features else None
        attend(kernel, q, k, v, ROW, Scores(0.3, window=window, softcap=softcap))
    assert (
        stand_ins.SEEN["fa3"]
        == stand_ins.SEEN["flash2"]
        == {
            "softmax_scale": 0.3,
            "window_size": (expected, 0),
            "softcap": 0.5,
        }
    )
    assert stand_ins.SEEN["varlen"] == {"softmax_scale": 0.3, "window_size": (expected, 0), "enable_gqa": True}
    left = None if expected < 0 else expected
    assert stand_ins.SEEN["fa4"] == {"softmax_scale": 0.3, "window_size_left": left, "causal": left is None}


def test_enable_gqa_is_set_only_for_grouped_heads(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 does not have this argument and accepts fewer key-value heads without it."""
    q, k, v = inputs(ROW)
    attend("varlen", q, k, v, ROW, PLAIN)
    assert stand_ins.SEEN["varlen"]["enable_gqa"] is True
    attend("varlen", q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), ROW, PLAIN)
    assert stand_ins.SEEN["varlen"]["enable_gqa"] is False
    monkeypatch.setattr(flash, "_NAMES_GROUPED_HEADS", False)
    attend("varlen", q, k, v, ROW, PLAIN)
    assert stand_ins.SEEN["varlen"]["enable_gqa"] is False


@pytest.mark.parametrize("name", ["flash_attention_3", "flash_attention_4"])
def test_fake_tensors_have_the_strides_of_results(name: str, kernels: None) -> None:
    """Inputs may have any layout, for example heads before tokens."""
    q, k, v = (torch.randn(heads, 7, SIZE).transpose(0, 1) for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS))
    packed = flash.Packed(ends((3, 4)), ends((3, 4)), 4, 4, 0.3, -1, 0.0)
    forward, backward = (getattr(torch.ops.rlrun, found).default for found in (name, f"{name}_backward"))
    torch.library.opcheck(forward, (q, k, v, *packed), test_utils="test_faketensor")
    output, lse = forward(q, k, v, *packed)
    given = (torch.randn_like(q), q, k, v, output, lse, *packed)
    torch.library.opcheck(backward, given, test_utils="test_faketensor")
    assert all(gradient.is_contiguous() for gradient in backward(*given))


def test_sinks_reduce_attention_weights() -> None:
    """With one key and a sink of equal score, the value has weight one half."""
    q, k, v = torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    scores = Scores(1.0, sinks=torch.tensor([4.0]))
    one = row_layout([1], CPU).segments
    torch.testing.assert_close(attend("sdpa", q, k, v, one, scores), torch.full((1, 1, 4), 0.5))
    capped = attend("sdpa", q, k, v, one, Scores(1.0, softcap=1.0, sinks=torch.tensor([0.0])))
    torch.testing.assert_close(capped, torch.full((1, 1, 4), 1 / (1 + math.exp(-math.tanh(4.0)))))
    with pytest.raises(ValueError, match=r"sinks of shape \[2\] for 1 heads"):
        attend("sdpa", q, k, v, one, Scores(1.0, sinks=torch.zeros(2)))


def test_every_attention_backend_has_a_function() -> None:
    assert FUNCTIONS.keys() == BACKENDS.keys()
