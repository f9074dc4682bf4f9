"""The trainer's part of a checkpoint, saved and loaded with torch's distributed checkpoint (DCP).

Each rank writes its own shards; any world size can load them. Writes are collective: if the volume refuses the write of one rank, all
ranks raise at the same place.

The learning rate is a function of the step, and `batch_step.seed_step` a function of seed and step. Therefore a checkpoint has neither
scheduler nor generator state; the progress is the step and the number of skipped updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from rlrun.protocol.files.volume_faults import STORAGE_REASONS, RefusedError, StorageReason, Trouble, trouble_of
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp_files
from rlrun.trainer.checkpoints.dcp_files import CheckpointReader, ChecksumWriter
from rlrun.trainer.modeling.parallel.pipeline_stages import of_all_stages, stage_of
from rlrun.trainer.ranks.group import Group


class Together:
    """File or folder to which all ranks write a part.

    Args:
        group: all ranks.
        folder: folder on the volume, for the message.
        doing: action in the message `cannot ...`.
    """

    def __init__(self, group: Group, folder: Path, doing: str) -> None:
        self._group, self._folder, self._doing = group, folder, doing
        self.refused: Trouble | None = None
        """Volume fault of this rank's write. The rank still takes part in later collectives."""

    @contextmanager
    def catch_refusal(self) -> Iterator[None]:
        """Context of this rank's write; stores a refusal of the volume and raises other errors."""
        try:
            yield
        except Exception as error:
            trouble = trouble_of(error, self._folder)
            if trouble is None:
                raise
            self.refused = self.refused or trouble

    def compare_results(self) -> None:
        """Compare the results of all ranks; all ranks call it together.

        Raises:
            RefusedError: the volume refused the write of at least one rank; raised on all ranks.
        """
        mine = 0 if self.refused is None else 1 + STORAGE_REASONS.index(self.refused.reason)
        # Every rank must take the same decision about the next collective, also if only one of them
        # saw the fault.
        worst = int(self._group.max_over_ranks({"refused": float(mine)})["refused"])
        if worst:  # all ranks use the same reason, because each measures how long the volume fails
            reason, own = STORAGE_REASONS[worst - 1], self.refused
            told = own if own is not None and own.reason == reason else _trouble_elsewhere(reason)
            raise volume_refusal(told, self._folder, self._doing)


def compare_results_among(peers: dist.ProcessGroup, error: Exception | None, folder: Path, doing: str) -> None:
    """Compare the results of all ranks like `Together.compare_results`, in another process group.

    Args:
        peers: process group; all its ranks call this function.
        error: error of this rank, or None; raised here if no rank has a volume fault.
        folder: folder on the volume, for the message.
        doing: action in the message `cannot ...`.

    Raises:
        RefusedError: the volume refused the write of at least one rank; raised on all ranks.
    """
    mine = None if error is None else trouble_of(error, folder)
    found: list[Trouble | None] = [None] * dist.get_world_size(peers)
    # Called by all ranks in every case: a rank that raised before it would leave the others in this
    # call.
    dist.all_gather_object(found, mine, group=peers)
    trouble = mine or next((other for other in found if other is not None), None)
    if trouble is not None:
        raise volume_refusal(trouble, folder, doing) from error
    if error is not None:
        raise error


def volume_refusal(trouble: Trouble, folder: Path, doing: str) -> RefusedError:
    """Return the error for a write that the volume refused."""
    return RefusedError(f"cannot {doing} in {folder}: {trouble.text}; {trouble.remedy}", trouble)


def catch_error(act: Callable[[], object]) -> Exception | None:
    """Call `act` and return its error, or None."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _trouble_elsewhere(reason: StorageReason) -> Trouble:
    state = {"StorageFull": "is full", "StorageReadOnly": "is read-only", "StorageFailing": "fails"}
    return Trouble(reason, f"the volume {state.get(reason, 'does not answer')} for another rank")


@dataclass
class Progress:
    """Counters of training."""

    step: int = 0
    """Last trained step, which is the version of the parameters."""
    skipped_steps: int = 0
    """Number of updates skipped because of a gradient that was not finite."""


@dataclass(frozen=True)
class Part:
    """Trained module and its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""State dict options: frozen parameters are not stored, because they come from the initial model. DCP reports other missing parameters."""
POLICY = "policy"
"""Name of the policy in checkpoints."""


def snapshot_shards(parts: Mapping[str, Part], progress: Progress) -> dict[str, Any]:
    """Return this rank's shards of a checkpoint; tensors share memory with modules and optimizers."""
    state: dict[str, object] = {"progress": {name: torch.tensor(value) for name, value in vars(progress).items()}}
    for name, part in parts.items():
        parameters, moments = get_state_dict(part.module, part.optimizer, options=TRAINED)
        if stage_of(part.module) is not None:
            # Each stage knows only its own parameters, but a checkpoint must load with another
            # number of stages.
            moments = moments | {"param_groups": _whole_groups(part.module, moments["param_groups"])}
        state[name] = {"model": parameters, "optimizer": moments}
    return state


def _whole_groups(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the parameter names of all pipeline stages to the optimizer's groups, as in a model without stages."""
    found = of_all_stages(module, [group["params"] for group in groups])
    whole = [list(dict.fromkeys(name for one in found for name in one[index])) for index in range(len(groups))]
    return [group | {"params": names} for group, names in zip(groups, whole, strict=True)]


def write_shards(state: dict[str, Any], path: Path, group: Group, peers: dist.ProcessGroup) -> tuple[FileEntry, ...]:
    """Write the shards into `path`/trainer; they are durable on all ranks after the return. All ranks call it together.

    Args:
        state: result of `snapshot_shards`, or a copy of it.
        path: folder of the checkpoint, which is incomplete until its manifest is written.
        group: all ranks.
        peers: gloo process group that only the calling thread uses.

    Returns:
        Manifest entries of all ranks' files on rank 0; an empty tuple on other ranks.

    Raises:
        RefusedError: the volume is full or read-only for at least one rank; raised on all ranks, after the files are deleted.
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
        # All ranks wait for rank 0's cleanup of an earlier try, which would otherwise delete their new files.
        compare_results_among(peers, catch_error(begin), path.parent, doing)
        compare_results_among(peers, catch_error(save), path.parent, doing)
    except RefusedError:
        if group.leads:
            remove_trainer_part(path)  # all ranks have stopped writing; free the space
        raise
    # Checksums were computed while the files were written, so the manifest does not need to read
    # them again.
    ranks: list[Any] | None = [None] * dist.get_world_size(peers) if group.leads else None
    dist.gather_object(writer.file_entries(path), ranks, dst=0, group=peers)
    return tuple(entry for entries in ranks or () for entry in entries)


def load_parts(parts: Mapping[str, Part], path: Path, *, say: Callable[[str], None] | None = None) -> Progress:
    """Load all parts from `path`/trainer, written with any world size. All ranks call it together.

    Parts that the checkpoint lacks, such as a critic added by a later objective, keep their values.

    Args:
        parts: trained modules and optimizers, by name.
        path: folder of the checkpoint.
        say: receiver of a message about each missing part.

    Raises:
        RoleError: the checkpoint belongs to another model (the message names the first different parameter), or contains unsupported
            values.
    """
    reader = CheckpointReader(path / TRAINER_PART)
    stored = reader.read_metadata().state_dict_metadata
    # The shards of the new model are the targets of the load: tensors are read in place, without a
    # second copy of the model.
    state = snapshot_shards(parts, Progress())
    for name in parts:
        # A part that was added later, such as a critic, starts from its initial values instead of
        # ending the run.
        if not any(key.startswith(f"{name}.") for key in stored):
            del state[name]
            if say is not None:
                say(f"{path.name} does not contain the {name}, which keeps its initial values")
            continue
        stage = stage_of(parts[name].module)
        own = {parameter: tensor.shape for parameter, tensor in state[name]["model"].items()}
        if (problem := _misfit_error(name, own if stage is None else stage.shapes, stored)) is not None:
            raise RoleError(f"{path} is the checkpoint of another model: {problem}", exit_codes.DATA)
        _leave_out_moments(name, state[name]["optimizer"]["state"], stored)
    dcp_files.load_state(state, reader)
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
    """Remove optimizer states of parameters that never had a gradient, because the checkpoint has no states for them.

    A new optimizer returns states for all parameters. An example are image parameters of a model that was trained only on text.
    """
    head = f"{part}.optimizer.state."
    kept = set()
    for key in stored:
        if key.startswith(head):
            name = key.removeprefix(head)
            # Names of parameters and of states both contain dots, so the longest known name is
            # searched from the right.
            while name and name not in moments:
                name = name.rpartition(".")[0]
            kept.add(name)
    for parameter in moments.keys() - kept:
        del moments[parameter]


def parameter_key(part: str, parameter: str) -> str:
    """Return the name of a parameter or buffer in the files of a checkpoint."""
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
            return f"{name} is {there.get(key, 'missing')} in the checkpoint, {wanted.get(key, 'missing')} in this run"
    return None


def _call_checked(transfer: Callable[[], object]) -> None:
    """Call `transfer` and convert `CheckpointException`, which is not a subclass of `Exception` and would bypass handlers."""
    try:
        transfer()
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
