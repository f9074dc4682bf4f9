"""Live and sent bytes, counted per operation, so that other work on the machine does not change them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlrun.trainer.modeling.shard import local_part


def tensors_in(*values: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            yield leaf


def mapped(address: int) -> bool:
    """Whether a file of weights is mapped at this address; the system keeps such pages only while it has room."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split()
        first, last = (int(bound, 16) for bound in span.split("-"))
        if first <= address < last:
            return path.endswith((".safetensors", ".bin"))
    return False


class LiveBytes(TorchDispatchMode):
    """Memory of the living tensors that operations in the block have used."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tensors_in(args, kwargs, found):
            self._meet(tensor)
        return found

    def _meet(self, tensor: Tensor) -> None:
        part = local_part(tensor)
        storage = getattr(part, "elem", part).untyped_storage()  # the result of a collective has its tensor in `elem`
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        size = 0 if mapped(storage.data_ptr()) else storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, storage._cdata, size)

    def _leave(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Collectives(TorchDispatchMode):
    """Calls of each collective with their input bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            given = args[1] if "scatter" in name or "allgather" in name else args[0]
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(given))
        return func(*args, **(kwargs or {}))
