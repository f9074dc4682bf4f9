"""Hugging Face exports: a model folder that transformers and vLLM load, from a published version or from a checkpoint.

A run exports what it has published, which is such a folder already: `export_version` links the files, so that it costs neither time nor
space. From a checkpoint, `export_checkpoint` reads the distributed shards file by file of the result: never the whole model at once. A
checkpoint of adapters holds only what was trained: the model that they change is loaded whole, and the updates are merged into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlrun.config.models.checkpoint import ExportConfig
from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.model import DType, ModelConfig
from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART
from rlrun.protocol.files.durable import link_files, new_folder
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import COMPLETE
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp_reader
from rlrun.trainer.checkpoints.dcp import POLICY, parameter_key
from rlrun.trainer.checkpoints.dcp_reader import CheckpointReader
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.model_files import model_files, published_tensors
from rlrun.trainer.modeling.shard import load_model
from rlrun.trainer.modeling.stored.files import open_files, stored_names
from rlrun.trainer.modeling.stored.plan import plan_tensors
from rlrun.trainer.modeling.tensor_names import Part, file_tensors, remember_names
from rlrun.trainer.weights.hf_writer import SHARD_BYTES, file_shards, shard_names, sizes_of, write_index


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    step: int
    parameters: int
    """Count of numbers."""
    bytes: int
    """Size of the weights' files."""


def is_due(config: ExportConfig, step: int, *, last: bool) -> bool:
    """True if a run exports the version that `step` made; `last`: no step follows."""
    at_interval = config.interval is not None and step % config.interval == 0
    return at_interval or (config.at_end and last)


def export_version(version: Path, output: Path) -> None:
    """Make `output` the model folder that the published `version` is; its files are shared where the volume can (hard links).

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
        checkpoint: its folder; whole, as its manifest says.
        output: appears when it is whole.
        model: says what was trained.
        source: where its configuration and tokenizer are.
        step: of the checkpoint.
        dtype: of the exported weights; None: the one that the run publishes.
        adapters: of the run; their updates are merged into the weights.
        shard_bytes: most bytes of one file, unless one parameter alone has more; about that much memory is needed, twice.

    Raises:
        RoleError: the checkpoint lacks a parameter of the model, or the volume is full or read-only.
    """
    chosen = model if dtype is None else model.model_copy(update={"dtype": dtype})
    number_format: torch.dtype = getattr(torch, chosen.dtype)
    skeleton = _model_skeleton(model, source) if adapters is None else _adapter_base(model, source, adapters)
    reader = CheckpointReader(checkpoint / TRAINER_PART)
    with storage_errors(checkpoint, "read the checkpoint"):
        stored = reader.read_metadata().state_dict_metadata
    tensors = published_tensors(skeleton)
    trained = [name for name, parameter in skeleton.named_parameters() if parameter.requires_grad]
    frozen = {name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad}
    wanted = [name for name in tensors if name not in frozen] if adapters is None else trained
    missing = [name for name in wanted if parameter_key(POLICY, name) not in stored]
    if missing:
        raise RoleError(
            f"{checkpoint} is of another model than {source}: it lacks {len(missing)} parameters, such as {missing[0]}",
            exit_codes.DATA,
        )
    sizes = sizes_of(tensors, number_format)
    total = sum(sizes.values())
    shards = file_shards(skeleton, sizes, shard_bytes=shard_bytes)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    if output.is_dir():
        output.rmdir()  # it is empty
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


def _convert_file(
    reader: CheckpointReader,
    members: Sequence[Part],
    stored: Mapping[str, Any],
    skeleton: nn.Module,
    number_format: torch.dtype,
) -> dict[str, Tensor]:
    """The tensors of one file, by name."""
    read = {
        name: tensor.to(number_format) if tensor.is_floating_point() else tensor
        for name, tensor in _read_parameters(
            reader, [name for part in members for name in part.names], stored, skeleton
        ).items()
    }
    return {
        name: tensor.contiguous() for part in members for name, tensor in file_tensors(skeleton, part, read).items()
    }


def _model_skeleton(model: ModelConfig, source: str) -> nn.Module:
    """The model without memory for what is trained: names, shapes, and which are one and the same."""
    options: dict[str, Any] = {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}
    try:
        architecture = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(
                architecture, trust_remote_code=model.trust_remote_code
            )
        names = stored_names(source, {"revision": options["revision"]})
        remember_names(skeleton, names)
        _read_frozen(skeleton, source, {"revision": options["revision"]}, names or [])
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RoleError(f"cannot read the model's configuration in {source}: {reason[0]}", exit_codes.DATA) from error
    return skeleton


def _read_frozen(skeleton: PreTrainedModel, source: str, options: Mapping[str, str], names: list[str]) -> None:
    """Fill what the architecture's code freezes, such as biases of routers: no checkpoint has it."""
    frozen = [name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad]
    if not frozen:
        return
    files = open_files(source, options, names)
    planned = plan_tensors(skeleton, files)
    for name in frozen:
        path, _, attribute = name.rpartition(".")
        whole = nn.Parameter(planned[name].whole(), requires_grad=False)
        skeleton.get_submodule(path).register_parameter(attribute, whole)


def _adapter_base(model: ModelConfig, source: str, adapters: LoRAConfig) -> nn.Module:
    """The model that the adapters change, with their places in it; what is trained requires gradients."""
    base = load_model(model, source)
    lora.inject_adapters(base, adapters)
    return base


def _read_parameters(
    reader: CheckpointReader, names: Sequence[str], stored: Mapping[str, Any], skeleton: nn.Module
) -> dict[str, Tensor]:
    """Whole parameters: out of the shards that hold parts of them, or the base model's with the update merged in (in float32)."""
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
        warnings.simplefilter("ignore", UserWarning)  # it says that there is no process group; none is meant
        dcp_reader.load_state(state, reader, alone=True)
    read = {name: state[keys[name]] for name in trained}
    tensors = skeleton.state_dict()
    for name in names:
        if name in halves:
            a, b = (state[keys[half]] for half in halves[name])
            read[name] = lora.merge_adapter(tensors[name], a, b, updates[name].scaling)
        elif name not in read:
            read[name] = tensors[name]
    return read
