"""Optimizer with moments in host memory, which are copied through two device buffers during a step.

    bucket i     copied in      stepped      copied out
    bucket i+1                copied in      stepped      copied out

All copies run in order on a separate stream, so a buffer is refilled only after it has been copied out. Parameters and gradients stay on
the device, and all numbers are computed there as without offload; only the location of moments between steps differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlrun.fit.trainer_memory import MOMENT_BUCKET_BYTES
from rlrun.trainer.learning.optim.muon import Muon, step_part
from rlrun.trainer.modeling.activation_offload import SMALLEST, CUDALink, HostLink, Link
from rlrun.trainer.modeling.shard import local_part

BUCKET_BYTES = MOMENT_BUCKET_BYTES
"""Limit of bytes of moments in one buffer. Moments of one parameter are never split and may exceed it."""
_FIRST_BYTES = 8
"""Assumed bytes of moments per element before the first step."""
_ALIGNMENT = 256
"""Alignment of tensors in a buffer in bytes, as in CUDA's allocator."""


@dataclass
class _Slot:
    """One of the two buffers and its content."""

    buffer: Tensor
    here: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    """Moments on the device: optimizer state, name, tensor."""
    hosts: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Host memory of the moments, by parameter and name."""
    leaving: list[Tensor] = field(default_factory=list)
    """New moments outside of the buffer that are being copied to the host."""
    arrived: object = None
    left: object = None


class HostMoments(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed for mypy
    """Wrapper that steps another optimizer bucket by bucket. It shares groups and states with it, so checkpoints are the same with and
    without.

    Args:
        inner: wrapped optimizer; it must treat each parameter independently, except for Muon, which takes parts itself.
        device: device of the parameters.
        link: copies between host and device. Default: by the device.
        bucket_bytes: see `BUCKET_BYTES`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        device: torch.device,
        *,
        link: Link | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        self._device, self._bucket_bytes = device, bucket_bytes
        self._link: Link = link or (CUDALink(device) if device.type == "cuda" else HostLink())
        self.buffer_bytes = 0
        """Bytes of both buffers in the last step; they exist on the device only during the optimizer's step."""
        if isinstance(inner, Muon):
            inner.iterate_buckets = self.iterate_buckets

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. The host does not wait for the device."""
        loss = None if closure is None else closure()
        self.buffer_bytes = 0
        if isinstance(self.inner, Muon):
            self.inner.step()
            return loss
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for bucket in self.iterate_buckets(with_gradient):
            step_part(self.inner, self.param_groups, bucket)
        return loss

    def iterate_buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Iterate over buckets of parameters; the moments of a bucket are on the device until the next bucket is requested."""
        buckets = self._plan_buckets(parameters)
        if not buckets:
            return
        # Two buffers alternate: while one bucket is stepped, the next is copied in and the previous is copied out.
        slots = [self._allocate_slot(buckets[parity::2]) for parity in (0, 1)]
        self.buffer_bytes = max(self.buffer_bytes, sum(slot.buffer.numel() for slot in slots))
        self._start_fetch(buckets[0], slots[0])
        for index, bucket in enumerate(buckets):
            if index + 1 < len(buckets):
                self._start_fetch(buckets[index + 1], slots[(index + 1) % 2])
            slot = slots[index % 2]
            self._link.wait_for_mark(slot.arrived)
            for state, name, tensor in slot.here:
                state[name] = tensor
            yield bucket
            self._start_send(bucket, slot)
        self._link.wait_for_mark(
            self._link.record_mark()
        )  # from here on other computations may use the buffers' memory

    def state_dict(self) -> dict[str, Any]:
        """Return the state with moments in host memory, after the last copy has finished."""
        self._link.wait_for_copies()
        found: dict[str, Any] = super().state_dict()
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, moment by moment into host memory; torch's implementation would copy all moments to the device first.

        Raises:
            ValueError: the state has different groups of parameters.
        """
        self._link.wait_for_copies()
        groups, saved = self.param_groups, state_dict["param_groups"]
        sizes, found = ([len(group["params"]) for group in of] for of in (groups, saved))
        if sizes != found:
            raise ValueError(f"the state has groups of {found} parameters, but the optimizer has {sizes}")
        for group, other in zip(groups, saved, strict=True):
            for parameter, key in zip(group["params"], other["params"], strict=True):
                values = state_dict["state"].get(key)
                if values is not None:
                    own = self.state.get(parameter, {})
                    self.state[parameter] = {
                        name: self._place_value(value, own.get(name)) for name, value in values.items()
                    }
            group |= {name: value for name, value in other.items() if name != "params"}

    def _place_value(self, value: Any, place: object) -> Any:
        """Move a loaded value to its location between steps; `place` is the current value there."""
        if not isinstance(value, Tensor):
            return value
        if not _is_moved(value):
            return _divided_like(local_part(value).to(self._device), value)
        if isinstance(place, Tensor) and local_part(place).data_ptr() == local_part(value).data_ptr():
            return place
        host = self._allocate_host(local_part(value))
        host.copy_(local_part(value))
        return _divided_like(host, value)

    def _plan_buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        found: list[list[nn.Parameter]] = []
        room = 0
        for parameter in parameters:
            size = self._moment_bytes([parameter]) or _FIRST_BYTES * local_part(parameter.detach()).numel()
            if not found or size > room:
                found.append([])
                room = self._bucket_bytes
            found[-1].append(parameter)
            room -= size
        return found

    def _moment_bytes(self, bucket: Sequence[nn.Parameter]) -> int:
        return sum(_aligned_bytes(local_part(value)) for *_, value in self._host_moments(bucket))

    def _host_moments(
        self, bucket: Sequence[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
        """Iterate over the moments that are in host memory between steps."""
        for parameter in bucket:
            state = self.state.get(parameter, {})
            yield from ((parameter, state, name, value) for name, value in state.items() if _is_moved(value))

    def _allocate_slot(self, buckets: Sequence[Sequence[nn.Parameter]]) -> _Slot:
        size = max(map(self._moment_bytes, buckets), default=0)
        return _Slot(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _start_fetch(self, bucket: Sequence[nn.Parameter], slot: _Slot) -> None:
        """Start to copy the moments of a bucket into a slot whose content has been sent."""
        if slot.leaving:
            self._link.wait_for_mark(slot.left)
            slot.leaving.clear()
        slot.here, slot.hosts, at = [], {}, 0
        for parameter, state, name, value in self._host_moments(bucket):
            host = local_part(value)
            tensor = slot.buffer[at : at + host.nbytes].view(host.dtype).view(host.shape)
            self._link.copy_to_device(host, tensor)
            slot.here.append((state, name, _divided_like(tensor, value)))
            slot.hosts[id(parameter), name] = value
            at += _aligned_bytes(host)
        slot.arrived = self._link.record_mark()

    def _start_send(self, bucket: Sequence[nn.Parameter], slot: _Slot) -> None:
        """Start to copy the moments of a bucket to their host memory, which is allocated for new moments."""
        inside = slot.buffer.untyped_storage().data_ptr()
        for parameter, state, name, value in [*self._host_moments(bucket)]:
            tensor, place = local_part(value), slot.hosts.get((id(parameter), name))
            if place is None or local_part(place).shape != tensor.shape:
                place = _divided_like(self._allocate_host(tensor), value)
            self._link.copy_to_host(tensor, local_part(place))
            if tensor.untyped_storage().data_ptr() != inside:
                slot.leaving.append(tensor)
            state[name] = place
        slot.here, slot.left = [], self._link.record_mark()

    def _allocate_host(self, tensor: Tensor) -> Tensor:
        """Allocate host memory for a tensor."""
        return self._link.buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def _is_moved(value: object) -> bool:
    """Return whether a value moves to the host; step counters and small tensors stay on the device."""
    return isinstance(value, Tensor) and local_part(value).nbytes >= SMALLEST


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-int(tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _divided_like(local: Tensor, value: Tensor) -> Tensor:
    """Wrap a rank's part with the sharding of `value`. `DTensor.from_local` would move it to the mesh's device."""
    if not isinstance(value, DTensor):
        return local
    divided: Tensor = DTensor(local, value._spec, requires_grad=False)
    return divided
