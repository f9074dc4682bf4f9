"""FLOPs per token, compared with the check value of Qwen3-0.6B."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3Config

from rlrun.trainer.modeling.flops import Cost, model_cost, peak_flops
from rlrun.trainer.proof.small_models import small_model


def test_qwen3_flops_match_the_check_value() -> None:
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    cost = model_cost(model)
    assert cost.active_parameters == 595_984_384
    assert cost.per_token(1024) == 3_928_227_840


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        "aria_text",  # fields `moe_num_experts` and `moe_topk`
        "hunyuan_v1_moe",
        "jetmoe",  # attention has experts too, under other names
        "gemma3",  # a model with images
        "modernbert-decoder",
    ],
)
def test_active_parameters_equal_counted_flops(kind: str) -> None:
    options = {"head_dim": 128, "num_experts": 16, "moe_topk": 2} if kind == "hunyuan_v1_moe" else {}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
    model = small_model(type(whole), whole.config, attention="eager", seq_len=64, seed=0).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([[5]]), use_cache=False)
    assert model_cost(model).active_parameters == pytest.approx(counter.get_total_flops() / 2, rel=0.02)


def test_untied_input_embedding_costs_no_flops(make_model: Callable[..., nn.Module]) -> None:
    assert model_cost(make_model()).active_parameters == model_cost(make_model(tied=True)).active_parameters


def test_quadratic_cost_matches_the_formula() -> None:
    cost = Cost(active_parameters=1000, pair=12)
    n = 50
    assert cost.total_flops([n]) == pytest.approx(6 * 1000 * (n + cost.quadratic * n**2))


def test_peak_flops_of_known_and_unknown_devices() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Some CPU") is None
