"""Share of a version's elements that differ from the version before, in bfloat16, by learning rate.

    python -m benchmarks.changed_elements [--steps 24] [--write]

The trainer's own step with AdamW trains a small model whose weights have the spread of large ones (0.02), each step on
other random sequences. A float32 master moves by about the learning rate; its bfloat16 value changes when it crosses
the middle between two values, which are 2^-13 apart at 0.02. `--write` writes the table to
benchmarks/results/changed_elements.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from loguru import logger

from benchmarks.cpu_cases import qwen3
from benchmarks.results_page import run_page
from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.bench import Bench, prepare_bench
from rlrun.trainer.learning.run_objective import Update

RESULTS = Path(__file__).parent / "results" / "changed_elements.md"
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
TOKENS, ROWS, VOCABULARY = 128, 4, 1024
SETTLED = 8
"""Steps after which AdamW's moments do not depend on a single step any more."""
ENTRY_BYTES, FULL_BYTES = 4, 2
"""Bytes of a changed element (its distance from the previous one in 16 bits, its value), and of an element of a full
version."""


def other_tokens(update: Update, step: int) -> Update:
    """Return the same rows with other random tokens and advantages."""
    rng = np.random.default_rng(step)
    samples = [
        replace(
            sample,
            input_ids=rng.integers(0, VOCABULARY, len(sample)).astype(np.int32),
            advantages=np.where(sample.loss_mask, rng.normal(), 0).astype(np.float32),
        )
        for sample in update.batch.samples
    ]
    return Update(Batch(update.batch.step, update.batch.attempt, tuple(samples)), update.rows)


def changed(bench: Bench, rate: float, steps: int) -> list[float]:
    """Return the shares of changed elements, step by step."""
    update = bench.update(TOKENS, ROWS)
    found: list[float] = []
    before: list[torch.Tensor] = []
    for step in range(steps + 1):
        now = [p.detach().to_local().to(torch.bfloat16) for p in bench.learner.model.parameters()]
        if before:
            differ = sum(int((new != old).sum()) for new, old in zip(now, before, strict=True))
            found.append(differ / sum(one.numel() for one in now))
        before = [one.clone() for one in now]
        bench.learner.step([other_tokens(update, step)], lr=rate)
    return found


@contextmanager
def small_bench(rate: float) -> Iterator[Bench]:
    """Provide the model, ready for steps on one rank and one core."""
    logger.remove()
    torch.set_num_threads(1)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= rank | {"MASTER_PORT": str(free_port())}
        config = TrainerConfig(
            name="changed",
            uid="changed",
            output_dir=folder,
            model=ModelConfig(
                path=str(qwen3(Path(folder), hidden_size=128, intermediate_size=256, vocab_size=VOCABULARY))
            ),
            max_steps=1,
            seq_len=TOKENS,
            seed=0,
            optimizer=OptimizerConfig(lr=rate),
            algorithm=AlgorithmConfig(),
            checkpoint=CheckpointConfig(),
        )
        with prepare_bench(config, longest=TOKENS) as bench:
            yield bench


def row(rate: float, steps: int) -> str:
    """Return one line of the table."""
    with small_bench(rate) as bench:
        shares = changed(bench, rate, steps)
    settled = statistics.mean(shares[SETTLED:])
    return f"| {rate:.0e} | {shares[0]:.2%} | {settled:.2%} | {max(shares):.2%} | {settled * ENTRY_BYTES / FULL_BYTES:.2%} |"


def table(steps: int) -> str:
    """Return all rates as Markdown."""
    return "\n".join(
        [
            "# Elements of a version that differ from the version before, in bfloat16",
            "",
            f"`python -m benchmarks.changed_elements --steps {steps}`; two Qwen3 layers, weights of spread 0.02, AdamW, {ROWS} other",
            f"random sequences of {TOKENS} tokens in each step, one rank on a CPU. Settled: mean of the steps after the {SETTLED}th.",
            f"Delta: bytes of a file of what changed ({ENTRY_BYTES} bytes each) by those of a full version. By arithmetic at 0.02 a step",
            "of 1e-6 crosses one of the middles, 1.2e-4 apart, in 0.8 % of the elements if every element moves by the whole rate.",
            "",
            "| learning rate | first step | settled | most | delta by full |",
            "|---|---|---|---|---|",
            *(row(rate, steps) for rate in RATES),
            "",
        ]
    )


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table, steps=24)
