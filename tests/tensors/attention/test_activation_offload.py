"""Offload: which copies are made, in which order, when memory is let go, and that buffers are used again."""

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
    """A link that notes what it is asked for, and copies only when it is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sizes: list[int] = []
        self._asked: list[tuple[Tensor, Tensor]] = []

    def buffer(self, size: int) -> Tensor:
        self.sizes.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN

    def out(self, tensor: Tensor, host: Tensor) -> None:
        self.events.append("out")
        self._asked.append((tensor, host))

    def back(self, host: Tensor, tensor: Tensor) -> None:
        self.events.append("back")
        tensor.fill_(torch.nan)
        self._asked.append((host, tensor))

    def mark(self) -> Any:
        return len(self._asked)

    def wait(self, mark: Any) -> None:
        self.events.append("wait")
        with torch.no_grad():
            for source, target in self._asked[:mark]:
                target.copy_(source)
        self._asked[:mark] = [(torch.zeros(0), torch.zeros(0))] * mark


class Layer(nn.Module):
    """Two products and a gate; the input is saved by both."""

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
def test_gradients_are_the_same_bit_by_bit(link: Any) -> None:
    """Also where a copy is only made once it is waited for: nothing is read before."""
    for found, expected in zip(step(layers(Offload(link()))), step(layers(None)), strict=True):
        assert torch.equal(found, expected)


def test_buffers_are_used_again_by_every_step() -> None:
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


def test_a_tensor_that_is_saved_twice_is_copied_once() -> None:
    link = Recorder()
    model = layers(Offload(link))
    model(inputs())
    kept = Counter(link.events)["out"]
    # Of a layer: its input, the tanh's result, and the gate's result, which the second product takes.
    assert kept == 3 * LAYERS


def test_copies_of_the_layer_before_are_asked_for_before_it_is_reached() -> None:
    link = Recorder()
    hidden = inputs()
    for layer in layers(Offload(link)):
        hidden = layer(hidden)
        hidden.register_hook(lambda gradient: link.events.append("reached"))
    link.events.clear()
    hidden.square().sum().backward()
    copies = [link.events[:place].count("back") for place, event in enumerate(link.events) if event == "reached"]
    # The last layer's are asked for when it is reached, with those of the layer before; from then on each is one layer ahead.
    assert copies == [0, 6, 9, 12]


def test_the_device_holds_few_layers() -> None:
    """What a layer has saved is let go once the computation has waited for its copy, `AHEAD` layers later."""
    link = Recorder()
    offload = Offload(link)
    references: list[weakref.ref[Tensor]] = []
    living: list[int] = []
    save = activation_offload.SavedLayer.save

    def noted(layer: Any, tensor: Tensor) -> Any:
        references.append(weakref.ref(tensor.untyped_storage()))
        return save(layer, tensor)

    model = layers(offload)
    activation_offload.SavedLayer.save = noted  # type: ignore[method-assign]
    try:
        hidden = inputs()
        for layer in model:
            hidden = layer(hidden)
            gc.collect()
            living.append(len({id(one()) for one in references if one() is not None}))
    finally:
        activation_offload.SavedLayer.save = save  # type: ignore[method-assign]
    assert len(references) >= 3 * LAYERS
    assert living[-1] <= 3 * AHEAD + 1
    hidden.sum().backward()


def test_small_tensors_and_passes_without_gradient_stay() -> None:
    link = Recorder()
    model = layers(Offload(link))
    with torch.no_grad():
        model(inputs())
    step(model, tokens=4)
    assert link.events.count("out") == 0


def test_a_graph_may_be_used_twice() -> None:
    model, plain = layers(Offload(HostLink())), layers(None)
    for one in (model, plain):
        output = one(inputs()).sum()
        output.backward(retain_graph=True)
        output.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, expected.grad)


def test_a_free_buffer_is_taken_if_it_is_not_much_too_large() -> None:
    buffers = Buffers(HostLink())
    for size in (3000, 100_000):
        buffers.give(torch.empty(size, dtype=torch.uint8))
    assert buffers.take(60_000).numel() == 100_000
    assert buffers.take(2000).numel() == 3000
    assert buffers.take(2000).numel() == 2048
    assert buffers.take((2 << 20) + 1).numel() == 4 << 20
    assert buffers.allocated == 2048 + (4 << 20)
