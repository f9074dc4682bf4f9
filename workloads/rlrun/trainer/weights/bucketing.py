"""Buckets of a version straight from the shards: a parameter is gathered once, and kept by the rank alone that will send it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlrun.config.models.model import DType
from rlrun.protocol.messages.buckets import Bucket, TensorInfo
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.tensor_names import file_tensors, parts
from rlrun.trainer.weights.hf_writer import gather, published_tensors


def layout(model: nn.Module, dtype: DType) -> list[TensorInfo]:
    """The tensors of a version's files, in the order in which `gather_buckets` meets them. Looks at shapes alone.

    Args:
        model: the policy, sharded or on meta.
        dtype: number format of the files.
    """
    found, tensors = [], published_tensors(model)
    for part in parts(model, tensors):
        first = tensors[part.names[0]]
        name = dtype if first.is_floating_point() else str(first.dtype).removeprefix("torch.")
        found += [TensorInfo(name=file, dtype=name, shape=list(shape)) for file, shape in part.files.items()]
    return found


def gather_buckets(
    model: nn.Module, buckets: list[Bucket], *, dtype: DType, root: int | None, pinned: bool
) -> dict[int, Tensor]:
    """This rank's buckets of a version as it is now, uint8 in host memory, by index. Every rank takes part.

    One parameter at a time is whole on a rank, besides what it keeps.

    Args:
        model: the sharded policy.
        buckets: all of `plan_buckets` of `layout`.
        dtype: number format of the files.
        root: number of the root that this rank is; None: it keeps nothing.
        pinned: in memory that a GPU reads without the CPU.
    """
    kept = {
        bucket.index: torch.empty(bucket.size, dtype=torch.uint8, pin_memory=pinned)
        for bucket in buckets
        if bucket.root == root
    }
    places = ((bucket.index, slot) for bucket in buckets for slot in bucket.slots)
    for name, tensor in _whole(model, dtype):
        index, slot = next(places)
        assert name == slot.tensor.name, "the layout is of another model"
        if index in kept:
            values = tensor.reshape(-1).contiguous().view(torch.uint8)
            kept[index][slot.offset : slot.end].copy_(values)
            del values
        del tensor  # or it lives while the next one is gathered
    return kept


def _whole(model: nn.Module, dtype: DType) -> Iterator[tuple[str, Tensor]]:
    number_format: torch.dtype = getattr(torch, dtype)
    updates, tensors = lora.updates(model), published_tensors(model)
    for part in parts(model, tensors):
        whole = {name: gather(tensors[name], number_format, updates.get(name)) for name in part.names}
        found = file_tensors(model, part, whole)
        del whole
        while found:
            name = next(iter(found))
            yield name, found.pop(name)
