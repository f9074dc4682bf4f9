"""Replayed routes on pipeline stages and tensor ranks: steps with the losses, gradients and metrics of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlrun.config.models.parallel import ParallelismConfig, RouterConfig
from rlrun.protocol.files.batch import write_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support import routed_models
from tests.support.sets import few_in_gate

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B": {"pp": 2},
    "Interleaved1F1B": {"pp": 2, "schedule": "Interleaved1F1B"},
    "ZBVZeroBubble": {"pp": 2, "schedule": "ZBVZeroBubble"},
    "tp": {"tp": 2},
}


def save_mixture(folder: Path) -> None:
    """Save a mixture of four layers, which can have two stages on each of two ranks."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **heads))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # so that the choice of experts matters
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("layout", few_in_gate(LAYOUTS, ("1F1B",)))
def test_replayed_steps_equal_those_of_one_rank(layout: str, make_run: Callable[[str], Any], tmp_path: Path) -> None:
    save_mixture(source := tmp_path / "source")
    recorded = RunPaths(tmp_path / "recorded")
    for step in range(1, STEPS + 1):
        write_batch(recorded.batch(step, 1), routed_models.make_batch(source, step=step))
    options: dict[str, Any] = {"model": source, "max_steps": STEPS, "replay": recorded.rollouts}
    options["gradient_accumulation"] = "local"  # which a zero-bubble schedule needs
    rollout = RouterConfig(replay="Rollout")
    one = make_run("one").train(router=rollout, **options)
    native = make_run("native").train(router=RouterConfig(), **options)
    two = make_run("two").train(ranks=2, parallelism=ParallelismConfig(**LAYOUTS[layout]), router=rollout, **options)
    assert [line["step"] for line in two] == [line["step"] for line in one] == list(range(1, STEPS + 1))
    for found, expected, other in zip(two, one, native, strict=True):
        for metric in ("loss", "grad_norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-4), (metric, expected["step"])
        assert other["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-2), "routes matter for this model"
        for metric in ("routing/replayed_share", "routing/changed_share", "routing/max_violation"):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-6), (metric, expected["step"])
        assert found["routing/changed_share"] > 0
