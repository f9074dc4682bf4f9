"""Offload of activations to host memory between forward and backward: concurrent copies into reused buffers.

    forward   layer 1     layer 2     layer 3            backward  layer 3     layer 2     layer 1
    copies          1 out       2 out       3 out                  3 in  2 in  1 in

All copies run in order on a separate stream, so that a buffer is read before it is overwritten. A device tensor is freed after the
computation has waited for its copy, `AHEAD` layers after it was saved; this limits the tensors that wait for a copy. The backward pass of
a layer prefetches the tensors of the previous layer.
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
"""Number of layers whose activations may wait on the device for their copy."""
SMALLEST = 4096
"""Smallest size of offloaded tensors in bytes; copying smaller ones costs more than it frees."""
_STEP = 2 << 20
"""Granularity of large buffers in bytes, so that rows of similar lengths share buffers."""


class Link(Protocol):
    """Ordered copies between a device and host memory, concurrent with the computation."""

    def buffer(self, size: int) -> Tensor:
        """Allocate host memory of `size` bytes, uint8."""

    def copy_to_host(self, tensor: Tensor, host: Tensor) -> None:
        """Copy to the host, after all computation queued so far."""

    def copy_to_device(self, host: Tensor, tensor: Tensor) -> None:
        """Copy to the device."""

    def record_mark(self) -> object:
        """Return a mark after all copies queued so far."""

    def wait_for_mark(self, mark: object) -> None:
        """Delay later computation until the copies before the mark have finished."""

    def wait_for_copies(self) -> None:
        """Wait on the host for all copies queued so far."""


class CUDALink:
    """Link with a CUDA stream for copies, and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        """See `Link`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy_to_host(self, tensor: Tensor, host: Tensor) -> None:
        """See `Link`."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)

    def copy_to_device(self, host: Tensor, tensor: Tensor) -> None:
        """See `Link`."""
        # Previous computation may still read its memory.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._stream)

    def record_mark(self) -> torch.cuda.Event:
        """See `Link`."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait_for_mark(self, mark: object) -> None:
        """See `Link`."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(mark)

    def wait_for_copies(self) -> None:
        """See `Link`."""
        self._stream.synchronize()


class HostLink:
    """Link for models on CPU: synchronous copies in host memory."""

    def buffer(self, size: int) -> Tensor:
        """See `Link`."""
        return torch.empty(size, dtype=torch.uint8)

    def copy_to_host(self, tensor: Tensor, host: Tensor) -> None:
        """See `Link`."""
        host.copy_(tensor)

    def copy_to_device(self, host: Tensor, tensor: Tensor) -> None:
        """See `Link`."""
        tensor.copy_(host)

    def record_mark(self) -> None:
        """See `Link`."""

    def wait_for_mark(self, mark: object) -> None:
        """See `Link`."""

    def wait_for_copies(self) -> None:
        """See `Link`."""


class Buffers:
    """Pool of host buffers; buffers are never freed."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: list[Tensor] = []
        self.allocated = 0
        """Total bytes of all buffers."""

    def take_buffer(self, size: int) -> Tensor:
        """Take the smallest free buffer of `size` to 2 * `size` bytes, or allocate one."""
        fits = [index for index, one in enumerate(self._free) if size <= one.numel() <= 2 * size]
        if fits:
            return self._free.pop(min(fits, key=lambda index: self._free[index].numel()))
        size = -(-size // _STEP) * _STEP if size > _STEP else 1 << (size - 1).bit_length()
        self.allocated += size
        return self._link.buffer(size)

    def return_buffer(self, buffer: Tensor) -> None:
        """Return a buffer to the pool; later copies may overwrite it."""
        self._free.append(buffer)


class Saved:
    """Tensor in host memory. Its buffer returns to the pool when the autograd graph deletes this object."""

    def __init__(self, tensor: Tensor, layer: SavedLayer) -> None:
        self._layer = layer
        self._shape = (tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype, tensor.device)
        buffer = layer.buffers.take_buffer(tensor.numel() * tensor.element_size())
        # The graph owns this object: its end is the only reliable sign that no later pass reads the
        # buffer.
        weakref.finalize(self, layer.buffers.return_buffer, buffer).atexit = False
        self._host = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        self._host = self._host.as_strided(self._shape[0], self._shape[1])
        layer.link.copy_to_host(tensor, self._host)
        self._here: Tensor | None = None
        self.uses = self._taken = 0

    def start_fetch(self) -> None:
        """Start the copy to the device."""
        if self._here is None:
            size, stride, dtype, device = self._shape
            self._here = torch.empty_strided(size, stride, dtype=dtype, device=device)
            self._layer.link.copy_to_device(self._host, self._here)

    def take_tensor(self) -> Tensor:
        """Return the tensor on the device. It stays there until each saved use has taken it."""
        # The first tensor of a layer that the backward pass asks for starts the copies of the layer
        # before it, so that they run in parallel with its computation.
        self._layer.wait_for_tensors()
        if self._here is None:  # a second backward pass over the same graph
            self.start_fetch()
            self._layer.link.wait_for_mark(self._layer.link.record_mark())
        tensor = self._here
        assert tensor is not None
        self._taken += 1
        # Several operations may have saved the same tensor; only the last use may free it.
        if self._taken == self.uses:
            self._here, self._taken = None, 0
        return tensor


@dataclass(frozen=True)
class Kept:
    """Saved use of a tensor in the graph, with its own shape."""

    saved: Saved
    shape: torch.Size

    def take_tensor(self) -> Tensor:
        """Return the tensor on the device."""
        tensor = self.saved.take_tensor()
        return tensor if tensor.shape == self.shape else tensor.view(self.shape)


class SavedLayer:
    """Tensors saved by one layer's forward pass, and a reference to the previous layer."""

    def __init__(self, link: Link, buffers: Buffers, before: SavedLayer | None) -> None:
        self.link, self.buffers = link, buffers
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[Saved]] = []
        self._leaving: list[Tensor] = []
        self._known: dict[tuple[int, ...], Saved] = {}
        self._left: object = None
        self._coming: object = None
        self._asked = self._needed = False

    def save_tensor(self, tensor: Tensor) -> Kept:
        """Copy a tensor to the host; elements that were saved before, in any shape, are copied once."""
        shape, tensor = tensor.shape, tensor.detach()
        if tensor.is_contiguous():
            tensor = tensor.view(-1)
        # All tensors are referenced until the end of the forward pass, so an address identifies a tensor.
        key = (tensor.data_ptr(), tensor._version, hash(tensor.dtype), *tensor.shape, *tensor.stride())
        saved = self._known.get(key)
        if saved is None:
            saved = self._known[key] = Saved(tensor, self)
            self._saved.append(weakref.ref(saved))
            self._leaving.append(tensor)
        saved.uses += 1
        return Kept(saved, shape)

    def end_forward(self) -> None:
        """End the forward pass."""
        self._known.clear()
        self._left = self.link.record_mark()

    def free_copied(self) -> None:
        """Free the tensors on the device after they are copied."""
        if self._leaving:
            # Freed memory is given to other tensors at once, so the copies out of it must have
            # ended.
            self.link.wait_for_mark(self._left)
            self._leaving.clear()

    def start_prefetch(self) -> None:
        """Start to copy all tensors to the device for the backward pass."""
        if self._asked:
            return
        self._asked = True
        self.free_copied()
        # The backward pass uses the tensors in the reverse order.
        for reference in reversed(self._saved):
            saved = reference()
            if saved is not None:
                saved.start_fetch()
        self._coming = self.link.record_mark()

    def wait_for_tensors(self) -> None:
        """Wait for the tensors in the backward pass, and prefetch those of the previous layer."""
        if self._needed:
            return
        self._needed = True
        self.start_prefetch()
        self.link.wait_for_mark(self._coming)
        before = None if self._before is None else self._before()
        if before is not None:
            before.start_prefetch()


class Offload:
    """Offload of a model's layers; one object for all layers, which share buffers and stream."""

    def __init__(self, link: Link | None = None) -> None:
        self._link = link
        self.buffers: Buffers | None = None if link is None else Buffers(link)
        self._layers: deque[SavedLayer] = deque(maxlen=AHEAD)

    def run(self, forward: Forward, layer: nn.Module, *inputs: object, **keywords: object) -> Tensor:
        """Run the forward pass of a layer and offload its saved tensors, except for parameters."""
        # Without gradients nothing is saved.
        if not torch.is_grad_enabled():
            return forward(*inputs, **keywords)
        link, buffers = self._create_buffers(layer.parameters())
        if len(self._layers) == AHEAD:
            # Only a few layers wait for their copies at the same time, which bounds the memory on
            # the device.
            self._layers[0].free_copied()
        saved = SavedLayer(link, buffers, self._layers[-1] if self._layers else None)
        self._layers.append(saved)
        # Parameters are saved for backward too, but FSDP frees and gathers them itself.
        weights = {_local_tensor(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor) -> Kept | Tensor:
            if isinstance(tensor, AsyncCollectiveTensor):  # a running sum over tensor ranks has no memory yet
                tensor = tensor.wait()
            stays = isinstance(tensor, nn.Parameter | DTensor) or tensor.untyped_storage().data_ptr() in weights
            return tensor if stays or tensor.numel() * tensor.element_size() < SMALLEST else saved.save_tensor(tensor)

        def unpack(kept: Kept | Tensor) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.take_tensor()

        try:
            with saved_tensors_hooks(pack, unpack):
                return forward(*inputs, **keywords)
        finally:
            saved.end_forward()

    def _create_buffers(self, parameters: Iterable[Tensor]) -> tuple[Link, Buffers]:
        """Create link and buffers at the first forward pass, when the parameters are on their device."""
        if self._link is None:
            device = next((parameter.device for parameter in parameters), torch.device("cpu"))
            self._link = CUDALink(device) if device.type == "cuda" else HostLink()
            self.buffers = Buffers(self._link)
        assert self.buffers is not None
        return self._link, self.buffers


class Forward(Protocol):
    """Forward method of a decoder layer; its inputs depend on the architecture."""

    def __call__(self, *inputs: object, **keywords: object) -> Tensor:
        """Return the output of the layer."""


def _local_tensor(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local
