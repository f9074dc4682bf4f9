"""Durable writes of the real trainer: weights by the Rust of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # here, not in each child that is forked

from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.model_files import ModelFiles
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer, retention
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
        retention.delete_superfluous(
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


TORCH_WRITERS: dict[str, Writer] = {"real-version": VersionWriter()}
