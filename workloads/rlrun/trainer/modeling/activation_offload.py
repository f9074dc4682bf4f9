"""Activations in host memory between forward and backward: copies beside the computation, into buffers that are used again.

    forward   layer 1     layer 2     layer 3            backward  layer 3     layer 2     layer 1
    copies          1 out       2 out       3 out                  3 in  2 in  1 in

All copies run on one stream of their own, in order, so that a buffer that is written again has been read before. A tensor on the device
is let go when the computation has waited for its copy: `AHEAD` layers after it was saved, so that no more than those wait to leave. The
backward pass of a layer asks for the tensors of the one before while it computes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

AHEAD = 2
"""Layers whose activations may wait on the device for their copy."""
SMALLEST = 4096
"""Bytes below which a tensor stays where it is: a copy costs more than it frees."""
_STEP = 2 << 20
"""Sizes of large buffers are multiples of this, so that rows of about the same length share them."""


class Link(Protocol):
    """Copies between a device and host memory, in order, beside the computation."""

    def buffer(self, size: int) -> Tensor:
        """Host memory of `size` bytes, uint8."""

    def out(self, tensor: Tensor, host: Tensor) -> None:
        """Copy to the host, after everything that the computation was asked for so far."""

    def back(self, host: Tensor, tensor: Tensor) -> None:
        """Copy to the device."""

    def mark(self) -> object:
        """Moment after all copies that were asked for so far."""

    def wait(self, mark: object) -> None:
        """Let what the computation is asked for from now on begin after that moment."""

    def settle(self) -> None:
        """Wait, on the host, for all copies that were asked for so far."""


class CUDALink:
    """A stream for copies, and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        """See `Link`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def out(self, tensor: Tensor, host: Tensor) -> None:
        """See `Link`."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)

    def back(self, host: Tensor, tensor: Tensor) -> None:
        """See `Link`."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))  # its memory may still be read
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """See `Link`."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: object) -> None:
        """See `Link`."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(mark)

    def settle(self) -> None:
        """See `Link`."""
        self._stream.synchronize()


class HostLink:
    """Copies within host memory, at once."""

    def buffer(self, size: int) -> Tensor:
        """See `Link`."""
        return torch.empty(size, dtype=torch.uint8)

    def out(self, tensor: Tensor, host: Tensor) -> None:
        """See `Link`."""
        host.copy_(tensor)

    def back(self, host: Tensor, tensor: Tensor) -> None:
        """See `Link`."""
        tensor.copy_(host)

    def mark(self) -> None:
        """See `Link`."""

    def wait(self, mark: object) -> None:
        """See `Link`."""

    def settle(self) -> None:
        """See `Link`."""


class Buffers:
    """Host memory that is taken and given back; nothing is freed before the process ends."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: list[Tensor] = []
        self.allocated = 0
        """Bytes so far."""

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes: the smallest that is free, if it is at most twice as large, or a new one."""
        fits = [index for index, one in enumerate(self._free) if size <= one.numel() <= 2 * size]
        if fits:
            return self._free.pop(min(fits, key=lambda index: self._free[index].numel()))
        size = -(-size // _STEP) * _STEP if size > _STEP else 1 << (size - 1).bit_length()
        self.allocated += size
        return self._link.buffer(size)

    def give(self, buffer: Tensor) -> None:
        """Let it be used again, by copies after those that were asked for so far."""
        self._free.append(buffer)


class Saved:
    """A tensor in host memory. Its buffer is free again when the graph lets it go."""

    def __init__(self, tensor: Tensor, layer: SavedLayer) -> None:
        self._layer = layer
        self._shape = (tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype, tensor.device)
        buffer = layer.buffers.take(tensor.numel() * tensor.element_size())
        weakref.finalize(self, layer.buffers.give, buffer).atexit = False
        self._host = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        self._host = self._host.as_strided(self._shape[0], self._shape[1])
        layer.link.out(tensor, self._host)
        self._here: Tensor | None = None
        self.uses = self._taken = 0

    def fetch(self) -> None:
        """Ask for the copy to the device."""
        if self._here is None:
            size, stride, dtype, device = self._shape
            self._here = torch.empty_strided(size, stride, dtype=dtype, device=device)
            self._layer.link.back(self._host, self._here)

    def take(self) -> Tensor:
        """The tensor on the device. It stays there until it was taken as often as it was saved."""
        self._layer.need()
        if self._here is None:  # a second backward pass over the same graph
            self.fetch()
            self._layer.link.wait(self._layer.link.mark())
        tensor = self._here
        assert tensor is not None
        self._taken += 1
        if self._taken == self.uses:
            self._here, self._taken = None, 0
        return tensor


@dataclass(frozen=True)
class Kept:
    """A tensor as the graph has it: the shape of contiguous elements, or as they were saved."""

    saved: Saved
    shape: torch.Size

    def take(self) -> Tensor:
        """The tensor, on the device."""
        tensor = self.saved.take()
        return tensor if tensor.shape == self.shape else tensor.view(self.shape)


class SavedLayer:
    """Tensors that one layer's forward pass has saved, and the layer before it."""

    def __init__(self, link: Link, buffers: Buffers, before: SavedLayer | None) -> None:
        self.link, self.buffers = link, buffers
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[Saved]] = []
        self._leaving: list[Tensor] = []
        self._known: dict[tuple[int, ...], Saved] = {}
        self._left: object = None
        self._coming: object = None
        self._asked = self._needed = False

    def save(self, tensor: Tensor) -> Kept:
        """A tensor's copy; the same for elements that were saved before, in whatever shape."""
        shape, tensor = tensor.shape, tensor.detach()
        if tensor.is_contiguous():
            tensor = tensor.view(-1)
        # Until the forward pass ends all tensors are held, so that an address is that of one of them.
        key = (tensor.data_ptr(), tensor._version, hash(tensor.dtype), *tensor.shape, *tensor.stride())
        saved = self._known.get(key)
        if saved is None:
            saved = self._known[key] = Saved(tensor, self)
            self._saved.append(weakref.ref(saved))
            self._leaving.append(tensor)
        saved.uses += 1
        return Kept(saved, shape)

    def end(self) -> None:
        """The forward pass is done."""
        self._known.clear()
        self._left = self.link.mark()

    def leave(self) -> None:
        """Let the tensors on the device go once they are copied."""
        if self._leaving:
            self.link.wait(self._left)
            self._leaving.clear()

    def ask(self) -> None:
        """Ask for all tensors, for the backward pass that comes."""
        if self._asked:
            return
        self._asked = True
        self.leave()
        for reference in reversed(self._saved):
            saved = reference()
            if saved is not None:
                saved.fetch()
        self._coming = self.link.mark()

    def need(self) -> None:
        """The backward pass is here: wait for the tensors, and ask for those of the layer before."""
        if self._needed:
            return
        self._needed = True
        self.ask()
        self.link.wait(self._coming)
        before = None if self._before is None else self._before()
        if before is not None:
            before.ask()


class Offload:
    """Offload of a model's layers. One for all of them, since they share buffers and stream."""

    def __init__(self, link: Link | None = None) -> None:
        self._link = link
        self.buffers: Buffers | None = None if link is None else Buffers(link)
        self._layers: deque[SavedLayer] = deque(maxlen=AHEAD)

    def run(self, forward: Forward, layer: nn.Module, *inputs: object, **keywords: object) -> Tensor:
        """The forward pass of a layer, whose saved tensors go to the host; parameters do not."""
        if not torch.is_grad_enabled():
            return forward(*inputs, **keywords)
        link, buffers = self._open(layer.parameters())
        if len(self._layers) == AHEAD:
            self._layers[0].leave()
        saved = SavedLayer(link, buffers, self._layers[-1] if self._layers else None)
        self._layers.append(saved)
        # Parameters are saved for backward too, and FSDP frees and gathers them itself.
        weights = {_local_tensor(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor) -> Kept | Tensor:
            if isinstance(
                tensor, AsyncCollectiveTensor
            ):  # the sum over tensor ranks, still on its way, has no memory of its own
                tensor = tensor.wait()
            stays = isinstance(tensor, nn.Parameter | DTensor) or tensor.untyped_storage().data_ptr() in weights
            return tensor if stays or tensor.numel() * tensor.element_size() < SMALLEST else saved.save(tensor)

        def unpack(kept: Kept | Tensor) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.take()

        try:
            with saved_tensors_hooks(pack, unpack):
                return forward(*inputs, **keywords)
        finally:
            saved.end()

    def _open(self, parameters: Iterable[Tensor]) -> tuple[Link, Buffers]:
        """Link and buffers, made by the first forward pass: only then the parameters are on their device."""
        if self._link is None:
            device = next((parameter.device for parameter in parameters), torch.device("cpu"))
            self._link = CUDALink(device) if device.type == "cuda" else HostLink()
            self.buffers = Buffers(self._link)
        assert self.buffers is not None
        return self._link, self.buffers


class Forward(Protocol):
    """`forward` of a decoder layer, whose inputs are the architecture's."""

    def __call__(self, *inputs: object, **keywords: object) -> Tensor:
        """Output of the layer."""


def _local_tensor(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local
