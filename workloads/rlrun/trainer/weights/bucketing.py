"""Buckets of a version, built from the shards: each parameter is gathered once and kept only by the rank that will send it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.config.models.language_models import DType
from rlrun.protocol.messages.buckets import Bucket, Slot, TensorInfo
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.encoders import encoder_parts
from rlrun.trainer.modeling.model_files import published_format, published_tensors
from rlrun.trainer.modeling.parallel.pipeline_stages import Stage, of_all_stages, stage_of
from rlrun.trainer.modeling.parallel.sharded_rows import meshes_of
from rlrun.trainer.modeling.tensor_names import file_tensors, tensor_parts
from rlrun.trainer.weights.hf_writer import gather_tensor


def bucket_layout(model: nn.Module, dtype: DType) -> list[TensorInfo]:
    """Return the tensors of a version's files in the order of `gather_buckets`, by stages. Only shapes are used.

    Args:
        model: policy, sharded or on the meta device; with a pipeline all ranks call this function together.
        dtype: number format of the files.
    """
    found, tensors = [], published_tensors(model)
    for part in tensor_parts(model, tensors):
        first = part.names[0]
        name = str(published_format(first, tensors[first], getattr(torch, dtype))).removeprefix("torch.")
        found += [TensorInfo(name=file, dtype=name, shape=list(shape)) for file, shape in part.files.items()]
    return [info for one in of_all_stages(model, found) for info in one]


def gather_buckets(
    model: nn.Module,
    buckets: list[Bucket],
    *,
    dtype: DType,
    root: int | None,
    pinned: bool,
    roots: Sequence[int] = (),
    earlier: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Return this rank's buckets of the current version by index, uint8 in host memory. All ranks call it together.

    In addition to its buckets, a rank has one complete parameter at a time. If the root is in another stage, the rank of this stage at
    the same position sends the bytes to it.

    Args:
        model: sharded policy.
        buckets: buckets from `plan_buckets` of `bucket_layout`.
        dtype: number format of the files.
        root: number of this rank's root, or None if it is not a root.
        pinned: use pinned host memory for a GPU.
        roots: ranks of all roots; required with a pipeline.
        earlier: this rank's buckets of an earlier version. Frozen encoders are copied from it and not gathered, except with a pipeline,
            whose stages send their bytes in a fixed order. All ranks have such a version, or none has.
    """
    # Allocate this rank's buckets.
    kept = {
        bucket.index: torch.empty(bucket.size, dtype=torch.uint8, pin_memory=pinned)
        for bucket in buckets
        if bucket.root == root
    }
    places = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
    stage = stage_of(model)
    if stage is None:
        frozen = () if earlier is None else tuple(f"{name}." for name in encoder_parts(model))
        _keep_tensors(kept, places, _whole_tensors(model, dtype, frozen), earlier=earlier)
        return kept
    # In a pipeline the stages take turns, in the order of the layout: one stage sends, the others receive.
    counts = of_all_stages(model, sum(len(part.files) for part in tensor_parts(model, published_tensors(model))))
    for index, end in enumerate(accumulate(counts)):
        of_stage = places[end - counts[index] : end]
        if index == stage.index:
            _keep_tensors(kept, of_stage, _whole_tensors(model, dtype), _Away(model, stage, roots))
        else:
            _receive_tensors(kept, of_stage, stage, index, next(model.parameters()).device)
    return kept


Place = tuple[Bucket, Slot]


class _Away:
    """Roots of other stages at this rank's position, to which this rank sends bytes of its stage."""

    def __init__(self, model: nn.Module, stage: Stage, roots: Sequence[int]) -> None:
        meshes = meshes_of(model)
        assert meshes is not None
        size = meshes.dims.stage_size
        self._group, own = stage.group, dist.get_rank() % size
        self._stages = {
            number: rank // size
            for number, rank in enumerate(roots)
            if rank % size == own and rank // size != stage.index
        }

    def send(self, root: int, values: Tensor) -> None:
        """Send the bytes of a tensor if this rank is responsible for the root."""
        if root in self._stages:
            dist.send(values, group=self._group, group_dst=self._stages[root])


def _keep_tensors(
    kept: dict[int, Tensor],
    places: Sequence[Place],
    whole: Iterator[tuple[str, Tensor | None]],
    away: _Away | None = None,
    earlier: Mapping[int, Tensor] | None = None,
) -> None:
    """Copy the tensors of this stage into buckets, or send them to other stages. None stands for the bytes of the earlier version."""
    order = iter(places)
    for name, tensor in whole:
        bucket, slot = next(order)
        assert name == slot.tensor.name, "the layout belongs to another model"
        if tensor is None:
            if earlier is not None and bucket.index in kept:
                kept[bucket.index][slot.offset : slot.end].copy_(earlier[bucket.index][slot.offset : slot.end])
            continue
        if bucket.index in kept or away is not None:
            values = tensor.reshape(-1).contiguous().view(torch.uint8)
            if bucket.index in kept:
                kept[bucket.index][slot.offset : slot.end].copy_(values)
            elif away is not None:
                away.send(bucket.root, values)
            del values
        del tensor  # free the tensor before the next one is gathered


def _receive_tensors(
    kept: dict[int, Tensor], places: Sequence[Place], stage: Stage, index: int, device: torch.device
) -> None:
    """Receive this rank's buckets of another stage's tensors."""
    for bucket, slot in places:
        if bucket.index in kept:
            values = torch.empty(slot.tensor.size, dtype=torch.uint8, device=device)
            dist.recv(values, group=stage.group, group_src=index)
            kept[bucket.index][slot.offset : slot.end].copy_(values)


def _whole_tensors(model: nn.Module, dtype: DType, frozen: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each tensor of the files, gathered; None for parameters whose names start with one of `frozen`, which are not gathered."""
    number_format: torch.dtype = getattr(torch, dtype)
    updates, tensors = lora.weight_updates(model), published_tensors(model)
    for part in tensor_parts(model, tensors):
        if frozen and all(name.startswith(frozen) for name in part.names):
            yield from ((name, None) for name in part.files)
            continue
        whole = {
            name: gather_tensor(tensors[name], published_format(name, tensors[name], number_format), updates.get(name))
            for name in part.names
        }
        found = file_tensors(model, part, whole)
        del whole
        while found:
            name = next(iter(found))
            yield name, found.pop(name)
