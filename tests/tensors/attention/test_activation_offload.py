"""Activation offload: number and order of copies, release of memory and reuse of buffers."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlrun.trainer.modeling import activation_offload
from rlrun.trainer.modeling.activation_checkpointing import keep_activations
from rlrun.trainer.modeling.activation_offload import AHEAD, Buffers, HostLink, Offload

LAYERS, WIDTH, TOKENS = 4, 64, 256


class Recorder(HostLink):
    """Link that records its calls and copies only in `wait`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sizes: list[int] = []
        self._asked: list[tuple[Tensor, Tensor]] = []

    def buffer(self, size: int) -> Tensor:
        self.sizes.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN

    def copy_to_host(self, tensor: Tensor, host: Tensor) -> None:
        self.events.append("out")
        self._asked.append((tensor, host))

    def copy_to_device(self, host: Tensor, tensor: Tensor) -> None:
        self.events.append("back")
        tensor.fill_(torch.nan)
        self._asked.append((host, tensor))

    def record_mark(self) -> Any:
        return len(self._asked)

    def wait_for_mark(self, mark: Any) -> None:
        self.events.append("wait")
        with torch.no_grad():
            for source, target in self._asked[:mark]:
                target.copy_(source)
        self._asked[:mark] = [(torch.zeros(0), torch.zeros(0))] * mark


class Layer(nn.Module):
    """Two products and a gate; both products save the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)) * hidden)


def layers(offload: Offload | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    if offload is not None:
        for layer in model:
            keep_activations(layer, "offload", offload)
    return model


def inputs(tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, tokens: int = TOKENS) -> list[Tensor]:
    model.zero_grad()
    model(inputs(tokens)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("link", [HostLink, Recorder])
def test_offload_keeps_gradients_bitwise_equal(link: Any) -> None:
    """A link that copies only in `wait` proves that no data is read earlier."""
    for found, expected in zip(step(layers(Offload(link()))), step(layers(None)), strict=True):
        assert torch.equal(found, expected)


def test_offload_buffers_are_reused_by_every_step() -> None:
    link = Recorder()
    offload = Offload(link)
    model = layers(offload)
    step(model)
    first = len(link.sizes)
    assert first > 0
    for tokens in (TOKENS, TOKENS - 3, TOKENS):
        step(model, tokens)
    assert len(link.sizes) == first
    assert offload.buffers is not None
    assert offload.buffers.allocated == sum(link.sizes)


def test_tensor_saved_twice_is_copied_once() -> None:
    link = Recorder()
    model = layers(Offload(link))
    model(inputs())
    kept = Counter(link.events)["out"]
    # Each layer saves its input, the result of tanh, and the gate's result, which the second product reads.
    assert kept == 3 * LAYERS


def test_copies_are_prefetched_one_layer_ahead() -> None:
    link = Recorder()
    hidden = inputs()
    for layer in layers(Offload(link)):
        hidden = layer(hidden)
        hidden.register_hook(lambda gradient: link.events.append("reached"))
    link.events.clear()
    hidden.square().sum().backward()
    copies = [link.events[:place].count("back") for place, event in enumerate(link.events) if event == "reached"]
    # The last layer requests its own copies and those of the previous layer; each later layer requests one layer ahead.
    assert copies == [0, 6, 9, 12]


def test_offload_keeps_few_layers_on_device() -> None:
    """The saved tensors of a layer are released `AHEAD` layers later, when the computation has waited for their copy."""
    link = Recorder()
    offload = Offload(link)
    references: list[weakref.ref[Tensor]] = []
    living: list[int] = []
    save = activation_offload.SavedLayer.save_tensor

    def noted(layer: Any, tensor: Tensor) -> Any:
        references.append(weakref.ref(tensor.untyped_storage()))
        return save(layer, tensor)

    model = layers(offload)
    activation_offload.SavedLayer.save_tensor = noted  # type: ignore[method-assign]
    try:
        hidden = inputs()
        for layer in model:
            hidden = layer(hidden)
            gc.collect()
            living.append(len({id(one()) for one in references if one() is not None}))
    finally:
        activation_offload.SavedLayer.save_tensor = save  # type: ignore[method-assign]
    assert len(references) >= 3 * LAYERS
    assert living[-1] <= 3 * AHEAD + 1
    hidden.sum().backward()


def test_offload_skips_small_tensors_and_no_grad_passes() -> None:
    link = Recorder()
    model = layers(Offload(link))
    with torch.no_grad():
        model(inputs())
    step(model, tokens=4)
    assert link.events.count("out") == 0


def test_offload_supports_second_backward_of_a_graph() -> None:
    model, plain = layers(Offload(HostLink())), layers(None)
    for one in (model, plain):
        output = one(inputs()).sum()
        output.backward(retain_graph=True)
        output.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, expected.grad)


def test_buffer_pool_avoids_much_larger_buffers() -> None:
    buffers = Buffers(HostLink())
    for size in (3000, 100_000):
        buffers.return_buffer(torch.empty(size, dtype=torch.uint8))
    assert buffers.take_buffer(60_000).numel() == 100_000
    assert buffers.take_buffer(2000).numel() == 3000
    assert buffers.take_buffer(2000).numel() == 2048
    assert buffers.take_buffer((2 << 20) + 1).numel() == 4 << 20
    assert buffers.allocated == 2048 + (4 << 20)
