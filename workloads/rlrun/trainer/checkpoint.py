"""Save and load the trainer's part of a checkpoint with torch's distributed checkpoint: every rank its own shards, any world size.

There is no scheduler state (the rate is a function of the step) and no generator state (`seed_step` is a function of seed and step),
so progress is the step and the count of skipped updates.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rlrun.protocol.failures import storage_errors
from rlrun.protocol.manifest import TRAINER_PART
from rlrun.trainer.group import Group


@dataclass
class Progress:
    """What a step adds to."""

    step: int = 0
    """The last trained step; the policy version that the parameters are."""
    skipped_steps: int = 0
    """Updates that were left out so far because the gradient was not finite."""


def seed_step(seed: int, step: int) -> None:
    """Seed the generators for a step: a resumed run draws what the uninterrupted one drew."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}".encode()))  # the CPU's generator looks at 32 bits only


@dataclass(frozen=True)
class Part:
    """A module that is trained, and the optimizer that remembers how."""

    module: nn.Module
    optimizer: torch.optim.Optimizer


POLICY = "policy"
"""Name of the part that every run has."""


def snapshot(parts: Mapping[str, Part], progress: Progress) -> dict[str, Any]:
    """This rank's shards of everything that a checkpoint holds; tensors share the memory of modules and optimizers."""
    state: dict[str, Any] = {"progress": {name: torch.tensor(value) for name, value in vars(progress).items()}}
    for name, part in parts.items():
        parameters, moments = get_state_dict(part.module, part.optimizer)
        state[name] = {"model": parameters, "optimizer": moments}
    return state


def write(state: dict[str, Any], path: Path, group: Group, peers: dist.ProcessGroup) -> None:
    """Write the shards into `path`/trainer, durable on all ranks when this returns. Every rank takes part.

    Args:
        state: a `snapshot`, or a copy of one.
        path: the checkpoint's folder; it is not complete before its manifest is written.
        group: the ranks.
        peers: the process group of gloo that the ranks meet in; of the calling thread alone.

    Raises:
        RoleError: the volume is full or read-only.
    """
    folder = path / TRAINER_PART
    with storage_errors(path.parent, "save the checkpoint"):
        if group.leads:
            shutil.rmtree(path, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier(peers)
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        _checked(lambda: dcp.save(state, storage_writer=writer, process_group=peers))


def load(parts: Mapping[str, Part], path: Path) -> Progress:
    """Fill all parts from `path`/trainer, whatever the world size that wrote it. Every rank takes part."""
    state = snapshot(parts, Progress())
    reader = dcp.FileSystemReader(path / TRAINER_PART)
    _checked(lambda: dcp.load(state, storage_reader=reader))
    for name, part in parts.items():
        loaded = state[name]
        set_state_dict(
            part.module, part.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
    return Progress(**{name: int(value) for name, value in state["progress"].items()})


def _checked(transfer: Callable[[], object]) -> None:
    """Run it; torch's error, which is no `Exception` and would pass every handler, becomes one."""
    try:
        transfer()
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
