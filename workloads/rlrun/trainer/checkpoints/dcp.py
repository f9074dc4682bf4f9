"""Save and load the trainer's part of a checkpoint with torch's distributed checkpoint: every rank its own shards, any world size.

There is no scheduler state (the rate is a function of the step) and no generator state (`seed_step` is a function of seed and step),
so progress is the step and the count of skipped updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART, FileEntry, remove_trainer_part
from rlrun.protocol.files.durable import make_folder
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.volume_faults import RefusedError
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp_reader
from rlrun.trainer.checkpoints.checksum_writer import ChecksumWriter
from rlrun.trainer.checkpoints.collective_write import agree_among, catch_error
from rlrun.trainer.checkpoints.dcp_reader import CheckpointReader
from rlrun.trainer.modeling.parallel.stages import of_all_stages, stage_of
from rlrun.trainer.ranks.group import Group


@dataclass
class Progress:
    """Counts that a step adds to."""

    step: int = 0
    """The last trained step; the policy version that the parameters are."""
    skipped_steps: int = 0
    """Updates that were left out so far because the gradient was not finite."""


@dataclass(frozen=True)
class Part:
    """A trained module and its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Options: frozen parameters come from the model that the run starts from; DCP checks while it loads that the rest is there."""
POLICY = "policy"
"""Name of the part that every run has."""


def snapshot_shards(parts: Mapping[str, Part], progress: Progress) -> dict[str, Any]:
    """Shards of this rank in a checkpoint; tensors share the memory of modules and optimizers."""
    state: dict[str, object] = {"progress": {name: torch.tensor(value) for name, value in vars(progress).items()}}
    for name, part in parts.items():
        parameters, moments = get_state_dict(part.module, part.optimizer, options=TRAINED)
        if stage_of(part.module) is not None:
            moments = moments | {"param_groups": _whole_groups(part.module, moments["param_groups"])}
        state[name] = {"model": parameters, "optimizer": moments}
    return state


def _whole_groups(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with the names of all stages' parameters, as a whole model has them."""
    found = of_all_stages(module, [group["params"] for group in groups])
    whole = [list(dict.fromkeys(name for one in found for name in one[index])) for index in range(len(groups))]
    return [group | {"params": names} for group, names in zip(groups, whole, strict=True)]


def write_shards(state: dict[str, Any], path: Path, group: Group, peers: dist.ProcessGroup) -> tuple[FileEntry, ...]:
    """Write the shards into `path`/trainer, durable on all ranks when this returns. Every rank takes part.

    Args:
        state: a `snapshot_shards`, or a copy of one.
        path: the checkpoint's folder; it is not complete before its manifest is written.
        group: the ranks.
        peers: the process group of gloo that the ranks meet in; of the calling thread alone.

    Returns:
        The manifest's entries of all ranks' files, on rank 0; nothing on the others. Each rank's are made while it writes.

    Raises:
        RefusedError: the volume is full or read-only, for one rank at least; on all of them. Nothing is left in `path`.
    """
    folder, doing = path / TRAINER_PART, "save the checkpoint"
    writer = ChecksumWriter(folder)

    def begin() -> None:
        if group.leads:
            remove_trainer_part(path)
            make_folder(folder)

    def save() -> None:
        _call_checked(lambda: dcp.save(state, storage_writer=writer, process_group=peers))

    try:
        agree_among(peers, catch_error(begin), path.parent, doing)
        agree_among(peers, catch_error(save), path.parent, doing)
    except RefusedError:
        if group.leads:
            remove_trainer_part(path)  # nothing is written there any more; others need the space
        raise
    ranks: list[Any] | None = [None] * dist.get_world_size(peers) if group.leads else None
    dist.gather_object(writer.entries(path), ranks, dst=0, group=peers)
    return tuple(entry for entries in ranks or () for entry in entries)


def load_parts(parts: Mapping[str, Part], path: Path, *, say: Callable[[str], None] | None = None) -> Progress:
    """Fill all parts from `path`/trainer, whatever the world size that wrote it. Every rank takes part.

    A part that the checkpoint does not have, such as the critic of an objective that was chosen later, stays as it is.

    Args:
        parts: what is trained, by name.
        path: the checkpoint's folder.
        say: gets a message about a part that stays as it is.

    Raises:
        RoleError: the checkpoint is of another model, and the first parameter that differs; or it holds what is not read.
    """
    reader = CheckpointReader(path / TRAINER_PART)
    stored = reader.read_metadata().state_dict_metadata
    state = snapshot_shards(parts, Progress())
    for name in parts:
        if not any(key.startswith(f"{name}.") for key in stored):
            del state[name]
            if say is not None:
                say(f"{path.name} has no {name}: it starts anew")
            continue
        stage = stage_of(parts[name].module)
        own = {parameter: tensor.shape for parameter, tensor in state[name]["model"].items()}
        if (problem := _misfit_error(name, own if stage is None else stage.shapes, stored)) is not None:
            raise RoleError(f"{path} is a checkpoint of another model: {problem}", exit_codes.DATA)
        _leave_out_moments(name, state[name]["optimizer"]["state"], stored)
    dcp_reader.load_state(state, reader)
    for name, part in parts.items():
        if name in state:
            set_state_dict(
                part.module,
                part.optimizer,
                model_state_dict=state[name]["model"],
                optim_state_dict=state[name]["optimizer"],
                options=TRAINED,
            )
    return Progress(**{name: int(value) for name, value in state["progress"].items()})


def _leave_out_moments(part: str, moments: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Leave out what the optimizer keeps of parameters that had no gradient before: a fresh optimizer shows it of every one.

    Such are the parameters of images in a model that has seen texts alone.
    """
    head = f"{part}.optimizer.state."
    kept = set()
    for key in stored:
        if key.startswith(head):
            name = key.removeprefix(head)
            while name and name not in moments:
                name = name.rpartition(".")[0]
            kept.add(name)
    for parameter in moments.keys() - kept:
        del moments[parameter]


def parameter_key(part: str, parameter: str) -> str:
    """Name of a parameter (or buffer) in the files of a checkpoint."""
    return f"{part}.model.{parameter}"


def _misfit_error(part: str, shapes: Mapping[str, torch.Size], stored: Mapping[str, Any]) -> str | None:
    wanted = {parameter_key(part, name): tuple(shape) for name, shape in shapes.items()}
    there = {
        key: tuple(getattr(entry, "size", ()))
        for key, entry in stored.items()
        if key.startswith(parameter_key(part, ""))
    }
    for key in sorted(wanted.keys() | there.keys()):
        if wanted.get(key) != there.get(key):
            name = key.removeprefix(parameter_key(part, ""))
            return f"{name} is {there.get(key, 'missing')} there, {wanted.get(key, 'missing')} here"
    return None


def _call_checked(transfer: Callable[[], object]) -> None:
    """Run it; torch's error, which is no `Exception` and would pass every handler, becomes one."""
    try:
        transfer()
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
