"""Packed against padded batches on skewed lengths: the time of a training step's forward and backward passes.

    python -m benchmarks.packing [--samples 32] [--repeats 2] [--write]

The same samples, model and loss in one run on one core. Padded: batches of equally many samples, each filled up to its longest. Packed:
the trainer's rows. A perfect trainer is faster by padded tokens / real tokens, the ideal ratio. `--write` keeps the table in
benchmarks/results/packing.md.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.results_page import run_page
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.bench import fake_batch
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.lm_head import logits_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import packed_attention

RESULTS = Path(__file__).parent / "results" / "packing.md"
GOAL = 0.9
VOCABULARY, LONGEST, ROW_TOKENS = 1000, 1024, 2048
CPU = torch.device("cpu")


def skewed_lengths(count: int) -> list[int]:
    """Return log-normal lengths, like replies of a language model: many short, few long."""
    drawn = np.random.default_rng(0).lognormal(math.log(120), 0.9, count)
    return [int(length) for length in drawn.clip(16, LONGEST)]


def make_model(implementation: str) -> nn.Module:
    """Return a model with two layers, wide enough that matrix products take most of the time."""
    packed_attention.register_attention()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=LONGEST,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation=implementation).train()


def packed_loss(model: nn.Module, samples: list[Sample], row: tuple[int, ...]) -> Any:
    """Return the sum of the log-probabilities of a packed row's loss tokens."""
    return token_statistics(model, micro_batch([samples[index] for index in row], CPU)).logprobs.sum()


def padded_loss(model: nn.Module, samples: list[Sample], row: tuple[int, ...]) -> Any:
    """Return the same sum for a batch `[S, L]` padded with zeros at the end, by transformers' own forward pass with
    SDPA."""
    longest = max(len(samples[index]) for index in row)
    ids, mask = torch.zeros(len(row), longest, dtype=torch.long), torch.zeros(len(row), longest, dtype=torch.bool)
    for at, index in enumerate(row):
        length = len(samples[index])
        ids[at, :length] = torch.from_numpy(samples[index].input_ids).long()
        mask[at, 1:length] = True
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    logprobs, _ = logits_statistics(logits, ids[:, 1:].flatten(), torch.ones(len(logits)))
    return (logprobs * mask[:, 1:].flatten()).sum()


def measure(loss: Any, model: nn.Module, samples: list[Sample], rows: list[tuple[int, ...]]) -> tuple[float, float]:
    """Return CPU seconds of all rows, and the loss."""
    total = 0.0
    began = time.process_time()
    for row in rows:
        value = loss(model, samples, row)
        value.backward()
        total += float(value.detach())
    seconds = time.process_time() - began
    model.zero_grad()
    return seconds, total


def table(samples: int, repeats: int) -> str:
    """Return both ways, measured alternately, as Markdown."""
    torch.set_num_threads(1)
    lengths = skewed_lengths(samples)
    fakes = [fake_batch(length, 1, VOCABULARY).samples[0] for length in lengths]
    packed_rows = list(plan_micro_batches(lengths, row_tokens=ROW_TOKENS, ranks=1).ranks[0])
    size = max(1, round(ROW_TOKENS / (sum(lengths) / samples)))
    padded_rows = [tuple(range(start, min(start + size, samples))) for start in range(0, samples, size)]
    padded_tokens = sum(len(row) * max(lengths[index] for index in row) for row in padded_rows)
    ideal = padded_tokens / sum(lengths)
    packed_model, padded_model = make_model(packed_attention.NAME), make_model("sdpa")
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    for turn in range(repeats + 1):
        packed, first = measure(packed_loss, packed_model, fakes, packed_rows)
        padded, second = measure(padded_loss, padded_model, fakes, padded_rows)
        assert abs(first / second - 1) < 1e-4, (first, second)
        if turn:
            seconds["packed"].append(packed)
            seconds["padded"].append(padded)
    packed, padded = (statistics.median(seconds[kind]) for kind in ("packed", "padded"))
    real = sum(lengths)
    return "\n".join(
        [
            f"# Packed against padded batches: {samples} samples of {min(lengths)} to {max(lengths)} tokens, log-normal",
            "",
            f"`python -m benchmarks.packing --samples {samples} --repeats {repeats}`; one core ({platform.machine()}), float32, no GPU.",
            f"Two Qwen3 layers of width 384. Padded: batches of {size} samples in order of arrival; packed: rows of {ROW_TOKENS} tokens.",
            "Median CPU time of forward and backward passes over all samples; both give the same loss.",
            "",
            "| | micro-batches | tokens computed | seconds | real tokens/s |",
            "|---|---|---|---|---|",
            f"| padded | {len(padded_rows)} | {padded_tokens} | {padded:.2f} | {real / padded:.0f} |",
            f"| packed | {len(packed_rows)} | {real} | {packed:.2f} | {real / packed:.0f} |",
            "",
            f"Speed-up {padded / packed:.2f}; ideal (padded tokens / real tokens) {ideal:.2f}; "
            f"share of the ideal {padded / packed / ideal:.2f} (goal: at least {GOAL}).",
            "",
        ]
    )


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table, samples=32, repeats=2)
