"""Publication of a policy version in a folder for transformers and vLLM.

A version is either the whole model, as sharded safetensors that all ranks write concurrently with low-rank updates merged, or only the
adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlrun.config.models.language_models import DType
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.durable import fsync_path, fsync_tree, make_folder, put_in_place, remove_folder
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE, TMP_SUFFIX
from rlrun.trainer.checkpoints.dcp import Together
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.model_files import ModelFiles, published_format, published_tensors
from rlrun.trainer.modeling.parallel.pipeline_stages import of_all_stages, stage_of
from rlrun.trainer.modeling.tensor_names import Part, file_tensors, tensor_parts
from rlrun.trainer.ranks.group import Group

SHARD_BYTES = 4 * 1024**3
"""Largest size of a file; there is at least one file per rank of a stage."""


def divide_names(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide names in order into at most `parts` nonempty lists of nearly equal bytes."""
    total, seen = sum(sizes.values()), 0
    runs: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        runs[min(seen * parts // max(total, 1), parts - 1)].append(name)
        seen += size
    return [run for run in runs if run]


def file_shards(model: nn.Module, sizes: Mapping[str, int], *, shard_bytes: int, least: int = 1) -> list[list[Part]]:
    """Return the parts of a model in each of its files.

    Args:
        model: policy, see `tensor_names.tensor_parts`.
        sizes: bytes of each published tensor, by name.
        shard_bytes: largest size of a file, unless one part is larger.
        least: minimum number of files.
    """
    state = model.state_dict()
    members = {part.names[0]: part for part in tensor_parts(model, {name: state[name] for name in sizes})}
    bytes_of = {first: sum(sizes[name] for name in part.names) for first, part in members.items()}
    count = max(least, -(-sum(sizes.values()) // shard_bytes))
    return [[members[first] for first in run] for run in divide_names(bytes_of, count)]


def shard_names(count: int) -> list[str]:
    """Return the file names of a model in `count` files, in the format of transformers."""
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, shards: Mapping[str, Sequence[Part]], total_size: int) -> None:
    """Write `model.safetensors.index.json`.

    Args:
        folder: folder of the model.
        shards: parts in each file, by file name.
        total_size: bytes of all tensors.
    """
    weight_map = {name: file for file, members in shards.items() for part in members for name in part.files}
    _write_index(folder, weight_map, total_size)


def _write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))


@dataclass(frozen=True)
class _Files:
    """Files of a version that the ranks of all stages write."""

    mine: Sequence[str]
    """Names of the files of this rank's stage."""
    weight_map: Mapping[str, str]
    """File of each tensor of the whole model."""
    size: int
    """Bytes of all tensors."""


def _files_of_all(shards: Sequence[Sequence[Part]], size: int, model: nn.Module) -> _Files:
    """Assign names to the files of all stages; with a pipeline all ranks call it together.

    Args:
        shards: parts in each file of this stage.
        size: bytes of this stage's tensors.
        model: sharded policy.
    """
    stage = stage_of(model)
    own = [[name for part in members for name in part.files] for members in shards]
    everyone = of_all_stages(model, (own, size))
    files = [tensors for one, _ in everyone for tensors in one]
    names = shard_names(len(files))
    before = 0 if stage is None else sum(len(one) for one, _ in everyone[: stage.index])
    return _Files(
        names[before : before + len(own)],
        {name: file for file, tensors in zip(names, files, strict=True) for name in tensors},
        sum(size for _, size in everyone),
    )


def publish_version(
    model: nn.Module, path: Path, *, files: ModelFiles, dtype: DType, group: Group, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights to `path`, which appears when it is durable and complete; `COMPLETE` is its last file.

    All ranks call it together. Each parameter is gathered once and kept only by the rank that writes it.

    Raises:
        RefusedError: the volume is full or read-only for at least one rank; raised on all ranks, after the files are deleted.
    """
    with new_version(path, group) as (unfinished, together):
        number_format: torch.dtype = getattr(torch, dtype)
        tensors, updates = published_tensors(model), lora.weight_updates(model)
        sizes = sizes_of(tensors, number_format)
        ranks = group.dims.stage_size
        shards = file_shards(model, sizes, shard_bytes=shard_bytes, least=ranks)
        files_of_all = _files_of_all(shards, sum(sizes.values()), model)
        for index, members in enumerate(shards):
            # All ranks take part in gathering each tensor, but only one keeps it and writes the
            # file. The files are written in parallel, and no rank holds the whole model.
            mine = index % ranks == group.rank % ranks
            kept: dict[str, Tensor] = {}
            for part in members:
                whole = {
                    name: gather_tensor(
                        tensors[name], published_format(name, tensors[name], number_format), updates.get(name)
                    )
                    for name in part.names
                }
                if mine:
                    found = file_tensors(model, part, whole)
                    kept |= {name: values.cpu().contiguous() for name, values in found.items()}
            # After a refusal the rank still gathers the remaining tensors, for which the other
            # ranks wait; it only stops writing.
            if mine and together.refused is None:
                with together.catch_refusal():
                    save_file(kept, unfinished / files_of_all.mine[index], metadata={"format": "pt"})
                    fsync_path(unfinished / files_of_all.mine[index])
        # Rank 0 knows the files of all ranks. A refused write of its own shard has made the version
        # useless already.
        if group.leads and together.refused is None:
            with together.catch_refusal():
                _write_index(unfinished, files_of_all.weight_map, files_of_all.size)
                for name, content in files.contents.items():
                    (unfinished / name).write_bytes(content)


def publish_adapter(model: nn.Module, path: Path, *, config: Mapping[str, Any], dtype: DType, group: Group) -> None:
    """Write only the adapter to `path`, like `publish_version` for the whole model. All ranks call it together.

    Args:
        model: policy with adapters.
        path: folder of the version.
        config: content of `adapter_config.json`.
        dtype: number format of the files.
        group: all ranks.

    Raises:
        RefusedError: the volume is full or read-only for at least one rank; raised on all ranks, after the files are deleted.
    """
    with new_version(path, group) as (unfinished, together):
        number_format: torch.dtype = getattr(torch, dtype)
        kept = {}
        for name, tensor in lora.adapter_tensors(model).items():
            whole = gather_tensor(tensor, number_format)
            # One rank of each stage keeps its layers; the gathering below needs only those.
            if group.rank % group.dims.stage_size == 0:
                kept[name] = lora.cut_to_rank(name, whole, config["r"]).cpu().contiguous()
        kept = {name: tensor for one in of_all_stages(model, kept) for name, tensor in one.items()}
        if group.leads:
            with together.catch_refusal():
                save_file(kept, unfinished / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                (unfinished / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def new_version(path: Path, group: Group) -> Iterator[tuple[Path, Together]]:
    """Yield a temporary folder, which becomes `path` with `COMPLETE` as last file after the block has ended on all ranks."""
    unfinished = path.with_name(path.name + TMP_SUFFIX)
    together = Together(group, path.parent, "publish weights")
    try:
        with together.catch_refusal():
            if group.leads:
                remove_folder(unfinished)  # left by a try that the volume refused
                make_folder(unfinished.parent)
                unfinished.mkdir()
        together.compare_results()
        # Agreed before the block: no rank writes into a folder that rank 0 could not create.
        yield unfinished, together
        together.compare_results()
        with together.catch_refusal():
            if group.leads:
                _finish_folder(unfinished, path)
        together.compare_results()
    except BaseException:
        if group.leads:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def sizes_of(tensors: Mapping[str, Tensor], number_format: torch.dtype) -> dict[str, int]:
    """Return the bytes of each tensor after conversion, see `published_format`."""
    return {
        name: tensor.numel() * published_format(name, tensor, number_format).itemsize
        for name, tensor in tensors.items()
    }


def gather_tensor(tensor: Tensor, number_format: torch.dtype, update: lora.Update | None = None) -> Tensor:
    """Gather a tensor in the published format; all ranks call it together. An update is added in float32 before the cast."""
    tensor = tensor.detach()
    if update is not None:
        return lora.merge_adapter(
            _whole_tensor(tensor), _whole_tensor(update.a), _whole_tensor(update.b), update.scaling
        ).to(number_format)
    return _whole_tensor(tensor.to(number_format) if tensor.is_floating_point() else tensor)


def _whole_tensor(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return whole


def _finish_folder(unfinished: Path, path: Path) -> None:
    # The files first, then `COMPLETE`, then the name: a reader that sees the final name always
    # finds complete and durable files.
    fsync_tree(unfinished)
    reach("weights.before_complete")
    (unfinished / COMPLETE).touch()
    fsync_path(unfinished)
    reach("weights.before_rename")
    put_in_place(unfinished, path)  # this attempt may have published it before, with the same content
    reach("weights.written")
