"""Fixtures: small models and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.modeling import packed_attention

VOCABULARY = 50
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
"""Model families of the tests with their own sizes; another name is an error."""


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """Return a function that builds small random models; equal seeds give equal weights for every attention."""

    def make(family: str = "llama", *, attn: str = packed_attention.NAME, tied: bool = False) -> nn.Module:
        packed_attention.register_attention()
        torch.manual_seed(0)
        options: dict[str, Any] = {**_SHAPE, "tie_word_embeddings": tied, **_FAMILIES[family]}
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**options), attn_implementation=attn)
        return cast(nn.Module, model.train())

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Return a function that builds a random sample whose first `prompt` tokens carry no loss."""

    def make(length: int, *, prompt: int = 2, seed: int = 0, temperature: float = 1.0, version: int = 0) -> Sample:
        rng = np.random.default_rng(seed + 1000 * length)
        mask = np.arange(length) >= prompt
        return Sample(
            input_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.random(length) - 3, 0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            temperature=temperature,
            environment="random",
            task_id=str(seed),
            group=0,
            rollout=seed,
            dispatch_version=version,
            reward=0.0,
        )

    return make


@pytest.fixture
def make_batch(make_sample: Callable[..., Sample]) -> Callable[..., Batch]:
    def make(lengths: list[int], *, step: int = 1, attempt: int = 1) -> Batch:
        samples = tuple(make_sample(length, seed=index) for index, length in enumerate(lengths))
        return Batch(step, attempt, samples)

    return make


@pytest.fixture
def rewarded(make_batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a function that builds batches with rewards in the column of advantages, where a critic reads them."""

    def make(lengths: Sequence[int] = (9, 4, 13, 6, 3), *, step: int = 1) -> Batch:
        batch = make_batch(list(lengths), step=step)
        samples = [
            dataclasses.replace(
                sample, advantages=np.where(sample.loss_mask, i % 3, 0).astype(np.float32), reward=i % 3
            )
            for i, sample in enumerate(batch.samples)
        ]
        return dataclasses.replace(batch, samples=tuple(samples))

    return make


@pytest.fixture
def source(tmp_path: Path, make_model: Callable[..., nn.Module]) -> Path:
    """Write a model folder with a tokenizer."""
    from rlrun.trainer.modeling.tiny_model import make_tokenizer

    folder = tmp_path / "source"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
