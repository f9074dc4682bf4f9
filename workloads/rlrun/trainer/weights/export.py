"""Hugging Face exports: model folders for transformers and vLLM, from a published version or from a checkpoint.

A published version is already such a folder: `export_version` creates hard links to its files, which takes neither time nor space.
`export_checkpoint` reads the shards of a checkpoint for one output file at a time, so it never has the whole model in memory. A
checkpoint of adapters contains only trained parameters: the base model is loaded completely, and the updates are merged into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlrun.config.models.checkpoint import ExportConfig
from rlrun.config.models.language_models import DType, LoRAConfig, ModelConfig
from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART
from rlrun.protocol.files.durable import link_files, new_folder
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import COMPLETE
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp_files
from rlrun.trainer.checkpoints.dcp import POLICY, parameter_key
from rlrun.trainer.checkpoints.dcp_files import CheckpointReader
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.encoders import freeze_encoders
from rlrun.trainer.modeling.model_files import model_files, published_format, published_tensors
from rlrun.trainer.modeling.router_replay import freeze_routers
from rlrun.trainer.modeling.shard import load_model
from rlrun.trainer.modeling.source_config import build_model, source_config
from rlrun.trainer.modeling.stored.load_plan import plan_tensors
from rlrun.trainer.modeling.stored.weight_files import open_files, stored_names
from rlrun.trainer.modeling.tensor_names import Part, file_tensors, remember_names
from rlrun.trainer.weights.hf_writer import SHARD_BYTES, file_shards, shard_names, sizes_of, write_index


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    step: int
    parameters: int
    """Number of parameters."""
    bytes: int
    """Total bytes of the weights."""


def is_due(config: ExportConfig, step: int, *, last: bool) -> bool:
    """Return whether a run exports the version of `step`; `last` is true for the last step."""
    at_interval = config.interval is not None and step % config.interval == 0
    return at_interval or (config.at_end and last)


def export_version(version: Path, output: Path) -> None:
    """Create the model folder `output` from a published version, with hard links if the volume supports them.

    Raises:
        RoleError: the volume is full or read-only.
    """
    with (
        storage_errors(output.parent, "export the model"),
        new_folder(output, before_rename="export.before_rename") as folder,
    ):
        link_files(version, folder, leave_out=(COMPLETE,))


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    model: ModelConfig,
    source: str,
    *,
    step: int,
    dtype: DType | None = None,
    adapters: LoRAConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write sharded safetensors with their index, `config.json`, `generation_config.json` and the tokenizer.

    Args:
        checkpoint: folder of a complete checkpoint.
        output: folder of the export, which appears after it is complete.
        model: configuration of the trained model.
        source: source of the model's configuration and tokenizer.
        step: step of the checkpoint.
        dtype: number format of the exported weights. Default: the published format.
        adapters: adapters of the run, whose updates are merged into the weights.
        shard_bytes: largest size of a file, unless one parameter is larger; the export needs about twice this memory.

    Raises:
        RoleError: the checkpoint lacks a parameter of the model, or the volume is full or read-only.
    """
    chosen = model if dtype is None else model.model_copy(update={"dtype": dtype})
    number_format: torch.dtype = getattr(torch, chosen.dtype)
    skeleton = _model_skeleton(model, source) if adapters is None else _adapter_base(model, source, adapters)
    reader = CheckpointReader(checkpoint / TRAINER_PART)
    with storage_errors(checkpoint, "read the checkpoint"):
        stored = reader.read_metadata().state_dict_metadata
    if adapters is None:
        _load_frozen(skeleton, model, source, stored)
    tensors = published_tensors(skeleton)
    trained = [name for name, parameter in skeleton.named_parameters() if parameter.requires_grad]
    frozen = {name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad}
    wanted = [name for name in tensors if name not in frozen] if adapters is None else trained
    _require_parameters(wanted, stored, checkpoint, source)
    sizes = sizes_of(tensors, number_format)
    total = sum(sizes.values())
    shards = file_shards(skeleton, sizes, shard_bytes=shard_bytes)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    if output.is_dir():
        output.rmdir()  # the caller has checked that it is empty
    with storage_errors(output.parent, "export the model"), new_folder(output) as folder:
        for file, members in files.items():
            save_file(
                _convert_file(reader, members, stored, skeleton, number_format),
                folder / file,
                metadata={"format": "pt"},
            )
        write_index(folder, files, total)
        for name, content in model_files(skeleton, chosen, source).contents.items():
            (folder / name).write_bytes(content)
    return Exported(step, sum(tensor.numel() for tensor in tensors.values()), total)


def _require_parameters(names: Sequence[str], stored: Collection[str], checkpoint: Path, source: str) -> None:
    missing = [name for name in names if parameter_key(POLICY, name) not in stored]
    if missing:
        raise RoleError(
            f"{checkpoint} belongs to another model than {source}; it lacks {len(missing)} parameters, such as {missing[0]}",
            exit_codes.DATA,
        )


def _convert_file(
    reader: CheckpointReader,
    members: Sequence[Part],
    stored: Mapping[str, Any],
    skeleton: nn.Module,
    number_format: torch.dtype,
) -> dict[str, Tensor]:
    """Read and convert the tensors of one file, by name."""
    read = {
        name: tensor.to(published_format(name, tensor, number_format))
        for name, tensor in _read_parameters(
            reader, [name for part in members for name in part.names], stored, skeleton
        ).items()
    }
    return {
        name: tensor.contiguous() for part in members for name, tensor in file_tensors(skeleton, part, read).items()
    }


def _model_skeleton(model: ModelConfig, source: str) -> PreTrainedModel:
    """Create the model without memory for its parameters; it has names, shapes and shared parameters."""
    with _configuration_errors(source):
        architecture = source_config(model, source)
        with torch.device("meta"):
            skeleton = build_model(model, architecture)
        freeze_encoders(skeleton)
    return skeleton


def _load_frozen(skeleton: PreTrainedModel, model: ModelConfig, source: str, stored: Collection[str]) -> None:
    """Load the parameters that the run does not train from the model's source.

    `stored`: keys of the checkpoint. A run with `trainer.router.freeze` has no routers in it.
    """
    options = {"revision": model.revision or "main"}
    with _configuration_errors(source):
        freeze_routers(skeleton, missing_in={key.removeprefix(parameter_key(POLICY, "")) for key in stored})
        remember_names(skeleton, stored_names(source, options))
        _read_frozen(skeleton, source, options)


@contextmanager
def _configuration_errors(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RoleError(f"cannot read the model's configuration in {source}: {reason[0]}", exit_codes.DATA) from error


def _read_frozen(skeleton: PreTrainedModel, source: str, options: Mapping[str, str]) -> None:
    """Load the parameters that the architecture freezes, such as biases of routers, because checkpoints do not contain them."""
    frozen = [name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad]
    if not frozen:
        return
    files = open_files(source, options)
    planned = plan_tensors(skeleton, files)
    for name in frozen:
        path, _, attribute = name.rpartition(".")
        whole = nn.Parameter(planned[name].read_all(), requires_grad=False)
        skeleton.get_submodule(path).register_parameter(attribute, whole)


def _adapter_base(model: ModelConfig, source: str, adapters: LoRAConfig) -> nn.Module:
    """Load the base model and add the adapters; only trained parameters require gradients."""
    base = load_model(model, source)
    lora.inject_adapters(base, adapters)
    return base


def _read_parameters(
    reader: CheckpointReader, names: Sequence[str], stored: Mapping[str, Any], skeleton: nn.Module
) -> dict[str, Tensor]:
    """Read complete parameters from the shards, or merge the update into the base model's parameters in float32."""
    updates = lora.weight_updates(skeleton)
    halves = {
        name: [name.removesuffix("weight") + half for half in lora.PARAMETERS] for name in names if name in updates
    }
    trained = [name for name in names if parameter_key(POLICY, name) in stored]
    keys = {
        name: parameter_key(POLICY, name) for name in [*trained, *(half for pair in halves.values() for half in pair)]
    }
    state = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about the missing process group, which is intended
        dcp_files.load_state(state, reader, alone=True)
    read = {name: state[keys[name]] for name in trained}
    tensors = skeleton.state_dict()
    for name in names:
        if name in halves:
            a, b = (state[keys[half]] for half in halves[name])
            read[name] = lora.merge_adapter(tensors[name], a, b, updates[name].scaling)
        elif name not in read:
            read[name] = tensors[name]
    return read
