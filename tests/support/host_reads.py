"""A mode that forbids the host to read from the device: on the CPU, where every read succeeds, each raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim"}
"""Operations whose result, or its size, the host has to know."""
_METHODS = {"tolist", "numpy", "cpu", "__array__", "item", "__bool__", "__float__", "__int__", "__index__"}


class HostReadError(AssertionError):
    """The host would wait for the device."""


class NoHostReads:
    """Forbids operations for which the host waits for a GPU, inside `with`, except inside `with .allowed():`.

    These include Boolean indices, and repeats without a given output size, because the size of their result is on the
    device.
    """

    def __init__(self) -> None:
        self.reads = 0
        """Number of allowed reads."""
        self._allowed = 0
        self._modes = _Functions(self), _Operations(self)

    def __enter__(self) -> NoHostReads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow reads from the device here; counted as one read."""
        self.reads += 1
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1

    def look(self, name: str) -> None:
        """Raise for a read of this name."""
        if not self._allowed:
            raise HostReadError(f"{name}: the host waits for the device here")


class _Functions(TorchFunctionMode):
    def __init__(self, owner: NoHostReads) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS:
            self._owner.look(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, owner: NoHostReads) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        sized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READS or sized or (name.startswith("index") and _by_mask(args)):
            self._owner.look(name)
        return func(*args, **kwargs)


def _by_mask(args: Any) -> bool:
    """Return whether one of an index operation's indices is a mask."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
