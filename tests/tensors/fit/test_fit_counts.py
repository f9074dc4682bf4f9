"""The arithmetic of `rlrun fit` against real models: parameters counted without memory, activations as autograd saves them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlrun.config.families import FAMILIES
from rlrun.fit import trainer_memory
from rlrun.fit.architecture import from_config
from rlrun.fit.memory_parts import layer_activations, outside_layers
from rlrun.fit.model_sources import count_on_meta, read_shape
from rlrun.trainer.learning import lm_head

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TOKENS = 64


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("phi3", {"pad_token_id": 0}),
        ("qwen2", {"head_dim": 8}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_the_pure_count_is_that_of_the_model(kind: str, changes: dict[str, Any]) -> None:
    config = {"model_type": kind} | SIZES | changes
    if kind in ("phi3", "qwen2"):  # their heads have hidden / heads
        config["head_dim"] = 8
    whole = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    assert from_config(whole.to_dict()).parameters == count_on_meta(config)


@pytest.mark.parametrize(
    ("kind", "changes", "tied"),
    [
        ("gemma", {"tie_word_embeddings": None}, True),  # its files do not say so, which is its default
        ("glm4", {"tie_word_embeddings": None, "pad_token_id": 0}, False),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0]}, False),
        ("llama", {"attention_bias": True}, False),
    ],
)
def test_a_folder_is_counted_in_the_model_where_sizes_do_not_tell(
    kind: str, changes: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    config = {name: value for name, value in ({"model_type": kind} | SIZES | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path, "spec.model.path", option="--model-config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
        )
    assert shape.exact
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied == tied


def test_a_type_that_transformers_does_not_know_is_not_counted() -> None:
    assert count_on_meta({"model_type": "not-there"} | SIZES) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activations_are_those_that_autograd_saves(kind: str, dtype: torch.dtype) -> None:
    """What is saved of a parameter is no activation. The rotation's angles and the scales of norms are left out of the arithmetic."""
    layers = 3
    config = AutoConfig.for_model(kind, **SIZES | {"num_hidden_layers": layers, "tie_word_embeddings": True})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).last_hidden_state
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / TOKENS
    shape, size = from_config(config.to_dict()), dtype.itemsize
    each = layer_activations(shape, "none", number_bytes=size, tp=1, compiled=False)
    expected = layers * each.kept + outside_layers(shape, size)
    assert hidden.requires_grad
    assert math.isclose(measured, expected, rel_tol=0.03)


def test_constants_are_those_of_the_trainer() -> None:
    assert lm_head.CHUNK_BYTES["cuda"] == trainer_memory.HEAD_CHUNK_BYTES
    assert (
        "cuda" not in lm_head.KEPT_BYTES
    )  # residuals are kept in memory that nothing else needs, which no estimate counts


def test_a_model_of_text_and_images_has_the_type_that_the_trainer_sees() -> None:
    """Compare all architectures in transformers whose text the trainer divides."""
    seen = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind)
        except Exception:  # it cannot be made of defaults
            continue
        text = config.get_text_config()
        if text is config or text.model_type not in FAMILIES:
            continue
        trained = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class.model_type
        seen[kind] = (trained, from_config(config.to_dict()).trained_type)
    assert "gemma3" in seen
    assert all(trained == found for trained, found in seen.values()), seen
