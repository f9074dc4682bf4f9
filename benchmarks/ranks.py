"""Share of a large model in one of many ranks: gradients between micro-batches, parameters, and the largest slice that
it reads.

    python -m benchmarks.ranks [--models Qwen/Qwen3-30B-A3B] [--ranks 8 128 512] [--write]

The model has no memory, and the product's `shard_model` divides it over a group of ranks of which only rank 0 exists.
The table compares the result with `rlrun fit`. Tests on gloo count bytes of real ranks
(`tests/trainer/test_gradient_memory.py`, `tests/trainer/test_loading_memory.py`). `--write` writes the table to
benchmarks/results/ranks.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from benchmarks.hand_over import config_of
from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.fit.architecture import KNOWN, Architecture
from rlrun.fit.trainer_memory import trainer_needs
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group, Meshes, ParallelDims

RESULTS = Path(__file__).parent / "results" / "ranks.md"
MODELS = ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B")
RANKS = (8, 32, 128, 512)
PER_MACHINE = 8
GB = 1e9
FILE_BYTES = 2
"""Bytes of a value in the model's files: bfloat16."""


def measure_rank_memory(shape: Architecture, ranks: int, copies: int) -> tuple[int, int]:
    """Return bytes of rank 0's part in float32, which is also the size of its gradient, and of the largest slice that
    it reads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    meshes = Meshes(ParallelDims.from_config(ParallelismConfig(dp_replicate=copies), ranks), "cpu")
    group = Group(0, ranks, torch.device("cpu"), meshes.layers, meshes)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32)
    parts = [local_part(parameter).numel() for parameter in shard_model(model, group).parameters()]
    dist.destroy_process_group()
    return 4 * sum(parts), FILE_BYTES * max(parts)


def by_fit(name: str, ranks: int, copies: int) -> float:
    """Return bytes of gradients by `rlrun fit`."""
    config = TrainerConfig(
        name="ranks",
        uid="ranks",
        output_dir="/ranks",
        model=ModelConfig(name=name),
        max_steps=1,
        seq_len=4096,
        seed=0,
        replicas=max(ranks // PER_MACHINE, 1),
        gpus_per_replica=min(ranks, PER_MACHINE),
        parallelism=ParallelismConfig(dp_replicate=copies),
        optimizer=OptimizerConfig(lr=1e-6),
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(),
    )
    needs = trainer_needs(config, KNOWN[name], None, memory=80 * 2**30, colocated=False)
    return next(part.bytes for part in needs.parts if part.name == "gradients")


def line(name: str, ranks: int, copies: int) -> str:
    """Return one row of the table."""
    part, largest = measure_rank_memory(KNOWN[name], ranks, copies)
    fit = by_fit(name, ranks, copies)
    return (
        f"| {name} | {ranks} | {copies} | {part / GB:.3f} | {fit / GB:.3f} | {part / fit:.3f} | {largest / 2**20:.1f} |"
    )


def table(models: list[str], ranks: list[int]) -> str:
    """Return all models as Markdown."""
    rows = [line(name, count, copies) for name in models for copies in (1, 2) for count in ranks if count > copies]
    return "\n".join(
        [
            "# What one of many ranks holds, without memory",
            "",
            f"`python -m benchmarks.ranks --models {' '.join(models)} --ranks {' '.join(map(str, ranks))}`;",
            "rank 0 of a group without the others, models on meta, divided by the product's `shard_model`. GB are 10^9 bytes. Copies:",
            "`parallelism.dpReplicate`. A rank's parameters in float32 are as many bytes as its gradients. When the model is loaded a rank",
            "reads its part in slices, each of at most the last column, out of files in bfloat16.",
            "",
            "| model | ranks | copies | gradients, GB | by `rlrun fit`, GB | ratio | largest slice read, MiB |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(KNOWN), default=list(MODELS), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    text = table(arguments.models, arguments.ranks)
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
