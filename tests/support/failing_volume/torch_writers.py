"""Durable writes of the real trainer: weights by the Rust of safetensors, checkpoints by torch's writer; and the load of a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # here, not in each child that is forked

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.attempts import Attempt, first_attempt, next_attempt, write_attempt
from rlrun.protocol.files.checkpoint_manifest import TRAINER_PART, complete_checkpoints, read_manifest, verify_files
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.trainer.checkpoints import dcp_files
from rlrun.trainer.checkpoints.checkpoint_manager import CheckpointManager
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.checkpoints.dcp_files import CheckpointReader
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.model_files import ModelFiles
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer, version_retention
from tests.support.failing_volume.writers import Seen, Writer, until_taken

_SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Rank:
    """The only rank of a trainer in this process, with its model."""

    own: ClassVar[Rank]

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.group = Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
        torch.manual_seed(0)
        config = LlamaConfig(**_SHAPE)
        self.model: nn.Module = shard_model(LlamaForCausalLM(config), self.group)
        for name, parameter in self.model.named_parameters():
            # Checkpoints contain only trained parameters: a write for each tensor of a model would be many times the
            # same one.
            parameter.requires_grad_("norm" in name)
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.part = Part(self.model, make_optimizer(self.model, OptimizerConfig(), self.group.device))
        self.part.optimizer.step()  # creates the moments


def begin_rank() -> None:
    """Become a rank; called once in each process that writes."""
    Rank.own = Rank()


class VersionWriter:
    """A policy version for the engines, and the retention of older ones."""

    def prepare(self, root: Path) -> None:
        write_attempt(RunPaths(root), first_attempt(world_size=1, config_hash="h"))
        for version in range(1, 4):
            self._publish(root, version, 1)

    def act(self, root: Path, attempt: int) -> None:
        self._publish(root, 4, 1)

    def _publish(self, root: Path, version: int, attempt: int) -> None:
        rank, paths = Rank.own, RunPaths(root)
        path, files = paths.version(version, attempt), ModelFiles({"config.json": b"{}"})
        until_taken(
            root,
            "publish the weights",
            lambda: hf_writer.publish_version(rank.model, path, files=files, dtype="bfloat16", group=rank.group),
        )
        version_retention.delete_superfluous(
            paths, attempt=first_attempt(world_size=1, config_hash="h", attempt=attempt), max_async_level=1
        )

    def seen(self, root: Path) -> Seen:
        found = RunPaths(root).versions_on_disk()
        for version in found:
            with safe_open(str(version.path / "model-00001-of-00001.safetensors"), "pt") as weights:
                assert len(list(weights.keys())) > 10
            assert (version.path / "config.json").read_bytes() == b"{}"
        steps = [version.step for version in found]
        assert steps[-2:] in ([2, 3], [3, 4]), steps
        return "new" if 4 in steps else "old"


def _fill(tensors: dict[str, torch.Tensor], step: int) -> None:
    """Set tensors to values that depend on the step."""
    for number, name in enumerate(sorted(tensors)):
        generator = torch.Generator().manual_seed(1000 * step + number)
        found = tensors[name].detach()
        local = found.to_local() if isinstance(found, DTensor) else found
        local.copy_(torch.rand(local.shape, generator=generator))


def _trained(part: Part) -> dict[str, torch.Tensor]:
    """Return parameters and moments of a part by their names in a checkpoint; the tensors share the part's memory."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in part.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"{POLICY}.model.{name}"] = parameter
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{POLICY}.optimizer.state.{name}.{moment}"] = part.optimizer.state[parameter][moment]
    return found


class CheckpointSaver:
    """A checkpoint of the real trainer: shards by torch's writer, manifest, retention."""

    OLD, NEW = (1, 2), 3

    def prepare(self, root: Path) -> None:
        write_attempt(RunPaths(root), self.attempt(1))
        for step in self.OLD:
            self._save(root, self.attempt(1), step)

    @staticmethod
    def attempt(number: int) -> Attempt:
        """The first attempt, or a later one that starts from the newest checkpoint."""
        first = first_attempt(world_size=1, config_hash="h")
        if number == 1:
            return first
        return next_attempt(first, CheckpointSaver.OLD[-1], attempt=number, world_size=1, config_hash="h")

    def act(self, root: Path, attempt: int) -> None:
        self._save(root, self.attempt(attempt), self.NEW)

    def _save(self, root: Path, attempt: Attempt, step: int) -> None:
        checkpoints = open_checkpoints(root, attempt)
        try:
            _fill(_trained(Rank.own.part), step)
            checkpoints.save(Progress(step))
            checkpoints.report_when_durable()
            while not checkpoints.wait_until_complete(step):
                if (failure := checkpoints.failure()) is not None:
                    raise failure
                if checkpoints.is_retry_due(blocks=True):
                    checkpoints.save(Progress(step))
                    checkpoints.report_when_durable()
                time.sleep(0.001)
        finally:
            checkpoints.close(wait=True)
        if (failure := checkpoints.wait_for_manifest()) is not None:
            raise failure

    def seen(self, root: Path) -> Seen:
        """Read like a reader without a rank: every byte against the manifest, every value against its step."""
        found = complete_checkpoints(RunPaths(root))
        steps = [checkpoint.step for checkpoint in found]
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
        for checkpoint in found:
            verify_files(checkpoint.path, read_manifest(checkpoint.path))
            reader = CheckpointReader(checkpoint.path / TRAINER_PART)
            stored = {
                name: torch.zeros(entry.size, dtype=entry.properties.dtype)
                for name, entry in reader.read_metadata().state_dict_metadata.items()
                if name.startswith(f"{POLICY}.model.") or name.endswith(("exp_avg", "exp_avg_sq"))
            }
            state = stored | {"progress.step": torch.tensor(0)}
            dcp_files.load_state(state, reader, alone=True)
            assert int(state["progress.step"]) == checkpoint.step
            assert len(stored) == 9, sorted(stored)
            wanted = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
            _fill(wanted, checkpoint.step)
            different = [name for name in stored if not torch.equal(stored[name], wanted[name])]
            assert not different, (checkpoint.step, different)
        return "new" if self.NEW in steps else "old"


class CheckpointLoader(CheckpointSaver):
    """The load of the checkpoint from which an attempt starts; it writes a file if every value equals the saved one."""

    def act(self, root: Path, attempt: int) -> None:
        part, step = Rank.own.part, self.OLD[-1]
        _fill(_trained(part), self.NEW)
        checkpoints = open_checkpoints(root, self.attempt(2))
        checkpoints.close(wait=True)
        wanted = {name: torch.zeros(tensor.shape) for name, tensor in _trained(part).items()}
        _fill(wanted, step)
        for name, tensor in _trained(part).items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, wanted[name]), name
        assert checkpoints.base.step == step
        self._mark(root).touch()

    @staticmethod
    def _mark(root: Path) -> Path:
        return root.with_name("loaded")  # next to the folder whose operations fail

    def seen(self, root: Path) -> Seen:
        assert super().seen(root) == "old"
        loaded = self._mark(root).exists()
        self._mark(root).unlink(missing_ok=True)
        return "new" if loaded else "old"


def open_checkpoints(root: Path, attempt: Attempt) -> CheckpointManager:
    """Open checkpoints of this process's rank like a trainer without an orchestrator; load the attempt's base."""
    config = TrainerConfig(
        name="run",
        uid="u",
        output_dir=str(root),
        model=ModelConfig(path="/model"),
        max_steps=3,
        seq_len=32,
        seed=0,
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(keep_last=2),
        micro_batch_tokens=64,
    )
    rank = Rank.own
    return CheckpointManager(
        config,
        attempt,
        {POLICY: rank.part},
        paths=RunPaths(root),
        group=rank.group,
        channel=None,
        volume=Volume(root),
        say=lambda message: None,
    )


TORCH_WRITERS: dict[str, Writer] = {
    "real-version": VersionWriter(),
    "real-checkpoint": CheckpointSaver(),
    "real-resume": CheckpointLoader(),
}
