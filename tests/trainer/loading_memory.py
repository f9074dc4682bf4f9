"""Memory of ranks that load a model: `python -m tests.trainer.loading_memory FOLDER RANKS PORT` writes and loads
models of every kind.

The program writes `FOLDER/found.json`: `{kind: [one per rank]}`, all in bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.trainer.modeling import load_weights
from rlrun.trainer.modeling.load_weights import Support
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.stored.weight_files import open_files
from rlrun.trainer.proof import start_check
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group, Meshes, ParallelDims, process_group
from tests.support.quantized_models import quantize_files
from tests.trainer import layouts
from tests.trainer.counted import LiveBytes

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "without-prefix": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "renamed": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
    "buffers": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8)),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=32, num_experts=8)
    ),
    "few-experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=32, num_experts=2)
    ),
    "renamed-experts": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=8)),
}
QUANTIZED: dict[str, Callable[[], Any]] = {
    "fp8": KINDS["llama"],
    "mxfp4": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, **EXPERTS, head_dim=16, num_local_experts=4, sliding_window=8, layer_types=None)
    ),
}
"""Kinds with quantized files: FP8 with blocks of 48 x 48, which ranks divide, and MXFP4 experts."""
HYBRID = "llama-hybrid"
"""First kind with two copies."""


def write(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = (KINDS | QUANTIZED)[kind]()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "fp8":
        quantize_files(folder, "fp8", ("proj.weight",), (48, 48))
    if kind == "mxfp4":
        quantize_files(folder, "mxfp4", ("experts.gate_up_proj", "experts.down_proj"))
    if kind == "without-prefix":
        save_file({name.removeprefix("model."): one for name, one in tensors.items()}, file, metadata={"format": "pt"})


def measure(kind: str, folder: Path, world: Group) -> dict[str, int]:
    layout = {"dp_replicate": 2} if kind == HYBRID else {}
    meshes = Meshes(ParallelDims.from_config(ParallelismConfig(**layout), world.world_size), "cpu")
    group = Group(world.rank, world.world_size, world.device, meshes.layers, meshes)
    opened: list[Any] = []

    def kept(*options: Any) -> Any:
        opened.append(open_files(*options))
        return opened[-1]

    with (
        mock.patch.object(load_weights, "open_files", kept),
        mock.patch.object(start_check, "check_architecture", return_value=Support(frozenset(), "row")),
        LiveBytes() as memory,
    ):
        model = load_checked(ModelConfig(path=str(folder)), str(folder), group, seq_len=64)
    parameters = list(model.parameters())
    (files,) = opened
    return {
        "whole": sum(4 * p.numel() for p in parameters),
        "largest": max(4 * p.numel() for p in parameters),
        "shard": sum(4 * local_part(p).numel() for p in parameters),
        "read": files.bytes_read,
        "stored": sum(one.numel() * one.element_size() for one in load_file(folder / "model.safetensors").values()),
        "largest_read": files.largest_read,
        "peak": memory.peak,
    }


def rank_main(folder: Path) -> None:
    with process_group(0) as world:
        found: dict[str, Any] = {}
        for kind in (*KINDS, *QUANTIZED, *([HYBRID] if world.world_size > 2 else [])):
            source = folder / kind.removesuffix("-hybrid")
            ranks: list[Any] = [None] * world.world_size
            dist.all_gather_object(ranks, measure(kind, source, world))
            found[kind] = ranks
        if world.leads:
            (folder / "found.json").write_text(json.dumps(found))
        world.barrier()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for one in (*KINDS, *QUANTIZED):
        write(one, place / one)
    sys.exit(layouts.fork_ranks(int(sys.argv[2]), int(sys.argv[3]), lambda: rank_main(place)))
