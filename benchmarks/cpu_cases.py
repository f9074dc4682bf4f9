"""Parts of the trainer's work on a CPU, timed with the version of the product on the import path.

    python benchmarks/cpu_cases.py PORT <<< CASE

Reads names of cases, one per line, and answers each with a line of JSON: seconds of CPU of one thread (median of its
repeats), and a digest of the result, which has to equal the other version's. The file imports nothing but the product,
so that it runs with commits that do not have it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPEATS, SECONDS = 3, 1.0
"""A case is repeated until both are reached: short ones often, because one time slice of the scheduler would change
their median."""
TOKENS = 65_536
STEP_TOKENS = 512
Act = Callable[[], float]
"""One run of a case; returns the digest."""


def qwen3(folder: Path, **sizes: int) -> Path:
    """Write the configuration of a small Qwen3 into the folder, and return it."""
    from transformers import Qwen3Config

    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 16_384} | sizes
    config = Qwen3Config(**shape, num_attention_heads=8, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@contextmanager
def step(folder: Path) -> Iterator[Act]:
    """A step on a row of 512 tokens, by the bench's own loop: forward, backward, norm, AdamW."""
    from rlrun.config.models.checkpoint import CheckpointConfig
    from rlrun.config.models.language_models import ModelConfig
    from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
    from rlrun.config.models.roles import TrainerConfig
    from rlrun.trainer.bench import prepare_bench

    config = TrainerConfig(
        name="step",
        uid="step",
        output_dir=str(folder),
        model=ModelConfig(path=str(qwen3(folder / "model"))),
        max_steps=1,
        seq_len=STEP_TOKENS,
        seed=0,
        optimizer=OptimizerConfig(lr=1e-6),
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(),
    )
    with prepare_bench(config, longest=STEP_TOKENS) as bench:
        update = bench.update(STEP_TOKENS, 1)
        yield lambda: bench.learner.step([update], lr=1e-6)["grad_norm"]


@contextmanager
def head(folder: Path) -> Iterator[Act]:
    """The LM head's statistics and their gradients: 128 tokens, vocabulary 150,000."""
    import torch

    from rlrun.trainer.learning.lm_head import head_statistics

    torch.manual_seed(0)
    hidden = (torch.randn(128, 512) / 8).requires_grad_()
    weight = (torch.randn(150_000, 512) / 4).requires_grad_()
    targets, temperatures = torch.randint(150_000, (128,)), torch.full((128,), 0.9)

    def act() -> float:
        hidden.grad = None
        logprobs, _ = head_statistics(hidden, weight, targets, temperatures)
        logprobs.sum().backward()
        return float(logprobs.detach().sum()) + float(hidden.grad.norm())

    yield act


@contextmanager
def packing(folder: Path) -> Iterator[Act]:
    """The plan of 4,096 samples for 16 ranks."""
    import numpy as np

    from rlrun.protocol.packing import micro_batches

    # Before the renames of 2026-11-29 the function was `plan`.
    functions = vars(micro_batches)
    plan = functions.get("plan_micro_batches") or functions["plan"]
    lengths = [int(one) for one in np.random.default_rng(0).lognormal(6.8, 1.0, 4096).clip(16, 8192)]

    def act() -> float:
        return float(
            sum(len(row) * len(row) for rank in plan(lengths, row_tokens=8192, ranks=16).ranks for row in rank)
        )

    yield act


@contextmanager
def gae(folder: Path) -> Iterator[Act]:
    """Generalized advantages of one sequence of 65,536 tokens, a tenth of which are not sampled."""
    import torch

    from rlrun.algorithms.returns import gae as estimate

    torch.manual_seed(0)
    rewards, values = torch.randn(TOKENS), torch.randn(TOKENS)
    mask = torch.rand(TOKENS) > 0.1

    def act() -> float:
        found = estimate(rewards, values, mask=mask, sequence_lengths=[TOKENS], gamma=0.99, lam=0.95)
        return float(found.advantages.abs().sum()) + float(found.returns.abs().sum())

    yield act


@contextmanager
def load(folder: Path) -> Iterator[Act]:
    """A model of 23 M parameters out of a file in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlrun.config.models.language_models import ModelConfig
    from rlrun.trainer.proof.start_check import load_checked

    source = qwen3(folder / "model")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    made.save_pretrained(source)
    with _group() as group:

        def act() -> float:
            model = load_checked(ModelConfig(path=str(source)), str(source), group, seq_len=STEP_TOKENS)
            return sum(float(p.detach().to_local().double().abs().sum()) for p in model.parameters())

        yield act


@contextmanager
def checkpoint(folder: Path) -> Iterator[Act]:
    """Parameters and moments of 23 M parameters into durable files with their checksums."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlrun.config.models.learning import OptimizerConfig
    from rlrun.trainer.checkpoints import dcp
    from rlrun.trainer.learning.optimizers import make_optimizer
    from rlrun.trainer.modeling.shard import shard_model

    config = AutoConfig.from_pretrained(qwen3(folder / "model"))
    torch.manual_seed(0)
    with _group() as group:
        model = shard_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), group)
        optimizer = make_optimizer(model, OptimizerConfig(lr=1e-6), group.device)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        count = 0

        def act() -> float:
            nonlocal count
            count += 1
            state = dcp.snapshot_shards({dcp.POLICY: dcp.Part(model, optimizer)}, dcp.Progress(1, 0))
            entries = dcp.write_shards(state, folder / f"c{count}", group, dist.group.WORLD)
            return float(sum(entry.size for entry in entries if entry.path.endswith(".distcp")))

        yield act


@contextmanager
def _group() -> Iterator[Any]:
    from rlrun.trainer.ranks.group import process_group

    with process_group(0) as group:
        yield group


CASES = {case.__name__: case for case in (step, head, packing, gae, load, checkpoint)}


def measure(case: str) -> dict[str, float]:
    """Return seconds and digest of one case; its first run is not timed."""
    with tempfile.TemporaryDirectory() as folder, CASES[case](Path(folder)) as act:
        digest = act()
        seconds: list[float] = []
        while len(seconds) < REPEATS or sum(seconds) < SECONDS:
            began = time.process_time()
            act()
            seconds.append(time.process_time() - began)
    return {"seconds": statistics.median(seconds), "digest": digest}


def main() -> None:
    """Entry point."""
    import torch
    from loguru import logger

    logger.remove()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = sys.argv[1]
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)


if __name__ == "__main__":
    main()
