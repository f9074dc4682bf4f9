"""Operations that each checkpointing mode repeats in the backward pass, counted with CPU stand-ins of attention
kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import activation_checkpointing, packed_attention
from rlrun.trainer.modeling.activation_checkpointing import keep_activations
from rlrun.trainer.modeling.shard import decoder_layers
from tests.support.sets import few_in_gate
from tests.tensors.attention import stand_ins

CPU = torch.device("cpu")
LAYERS = 2
MODES = ("none", "selective", "attention", "full", "offload")
KERNELS = ("varlen", "fa3", "fa4", "flash2")


class Counts(TorchDispatchMode):  # type: ignore[misc]
    """Counter of computed operations; an operation with a kept result is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def train_and_count(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], mode: Any, attn: str
) -> tuple[Counter[str], dict[str, Tensor]]:
    model = make_model("qwen3", attn=attn)
    for layer in decoder_layers(model):
        keep_activations(layer, mode)
    with Counts() as counts:
        row = micro_batch([make_sample(9), make_sample(13, seed=1)], CPU)
        token_statistics(model, row).logprobs.sum().backward()
    return counts.calls, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kernel", "mode"),
    few_in_gate(product(KERNELS, MODES), [*product(["varlen"], MODES), *product(KERNELS[1:], ("attention", "full"))]),
)
def test_attention_is_recomputed_only_in_mode_full(
    mode: Any,
    kernel: Any,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins.install(monkeypatch)
    attn = packed_attention.implementation_name(kernel)
    _, found = train_and_count(make_model, make_sample, mode, attn)
    assert list(stand_ins.CALLS.items()) == [(kernel, (2 if mode == "full" else 1) * LAYERS)]
    _, expected = train_and_count(make_model, make_sample, "none", packed_attention.NAME)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", ["varlen", "fa4"])
def test_attention_with_sinks_is_recomputed_only_in_mode_full(
    mode: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.install(monkeypatch)
    found, expected = (with_sinks(one, mode) for one in (kernel, "sdpa"))
    assert stand_ins.CALLS[kernel] == (2 if mode == "full" else 1)
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own, exact, atol=1e-5, rtol=1e-5)


def with_sinks(kernel: Any, mode: Any) -> list[Tensor]:
    """Return the gradients of a layer that consists of attention with sinks and a product."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    layer.sinks = nn.Parameter(torch.randn(2))
    row = packed_attention.row_layout([20, 30], CPU)

    def forward(hidden: Tensor) -> Tensor:
        heads = nn.functional.linear(hidden, layer.weight).unflatten(1, (2, 8)).transpose(0, 1)[None]
        found, _ = packed_attention.packed_attention(
            layer, heads, heads, heads, None, packed=row, kernel=kernel, s_aux=layer.sinks
        )
        return found[0].flatten(1)

    layer.forward = forward
    keep_activations(layer, mode)
    hidden = torch.randn(50, 16, requires_grad=True)
    layer(hidden).square().sum().backward()
    return [hidden.grad, layer.weight.grad, layer.sinks.grad]


def test_products_are_recomputed_unless_selected(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    calls = {mode: train_and_count(make_model, make_sample, mode, packed_attention.NAME)[0] for mode in MODES}
    attended = "aten::_scaled_dot_product_flash_attention_for_cpu"
    products = {mode: found["aten::mm"] for mode, found in calls.items()}
    assert products["selective"] == products["none"] == products["offload"]
    assert products["attention"] == products["full"] == products["none"] + 6 * LAYERS  # the last product is not needed
    once = calls["none"][attended]
    assert once == LAYERS
    assert [calls[mode][attended] for mode in MODES] == [once, once, once, 2 * once, once]


def test_unregistered_operations_are_skipped() -> None:
    found = activation_checkpointing.find_operations(
        ["aten::mm", "aten::of_another_version", "of_another_package::attention"]
    )
    assert torch.ops.aten.mm.default in found
    assert {str(operation).rpartition(".")[0] for operation in found} == {"aten.mm"}
