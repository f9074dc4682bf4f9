"""Arithmetic of `rlrun fit`, compared with real models: parameter counts and saved activations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlrun.config.families import FAMILIES
from rlrun.config.models.language_models import ModelConfig
from rlrun.fit import trainer_memory
from rlrun.fit.architecture import from_config
from rlrun.fit.memory_parts import layer_activations, outside_layers
from rlrun.fit.model_sources import UnknownModelError, auto_class, read_shape, shape_of
from rlrun.trainer.learning import lm_head
from rlrun.trainer.modeling.encoders import freeze_encoders
from tests.support.own_models import SIZES as SIZES_OF_OWN
from tests.support.own_models import path_of, write_model
from tests.support.sets import few_in_gate

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


def build_on_meta(config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                config["model_type"], **{name: value for name, value in config.items() if name != "model_type"}
            )
        )


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
def test_parameter_count_equals_model_on_meta_device(kind: str, changes: dict[str, Any]) -> None:
    config = {"model_type": kind} | SIZES | changes
    if kind in ("phi3", "qwen2"):  # these models derive the head size from hidden / heads
        config["head_dim"] = 8
    whole = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    assert from_config(whole.to_dict()).parameters == sum(one.numel() for one in build_on_meta(config).parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "tied"),
    [
        ("gemma", {"tie_word_embeddings": None}, True),  # its files omit the field, and its default is tied
        ("glm4", {"tie_word_embeddings": None, "pad_token_id": 0}, False),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0]}, False),
        ("llama", {"attention_bias": True}, False),
    ],
)
def test_folder_with_incomplete_sizes_is_counted_exactly(
    kind: str, changes: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    config = {name: value for name, value in ({"model_type": kind} | SIZES | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path, "spec.model.path", option="--model-config")
    model = build_on_meta(config)
    assert shape.is_exact
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied == tied


@pytest.mark.parametrize("kind", few_in_gate(["gemma3", "mistral3", "qwen2_vl", "qwen3_5", "qwen3_vl"], ["qwen3_vl"]))
def test_frozen_encoder_is_counted_separately(kind: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, "spec.model.path", option="--model-config")
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    freeze_encoders(model)
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    assert shape.encoder == sum(frozen) > 0
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_unknown_model_type_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not-there"} | SIZES))
    shape = read_shape(tmp_path, "spec.model.path", option="--model-config")
    assert not shape.is_exact
    assert shape.counted is None


def test_own_class_is_counted_with_its_additional_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    shape = shape_of(ModelConfig(path=str(folder), class_=path_of("GatedForCausalLM")), "spec.model")
    gates = SIZES_OF_OWN["num_hidden_layers"] * SIZES_OF_OWN["hidden_size"] ** 2
    llama = LlamaForCausalLM(LlamaConfig(**SIZES_OF_OWN))
    assert shape.counted == sum(parameter.numel() for parameter in llama.parameters()) + gates
    assert shape.is_exact


def test_missing_own_class_is_not_estimated_as_a_llama(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_model(tmp_path)), class_="no_such.module:A")
    with pytest.raises(
        UnknownModelError, match=r"^model.class no_such.module:A: cannot import .*config.json: --model-config FOLDER\)"
    ):
        shape_of(model, "spec.model")
    assert not shape_of(model, "spec.model", count=False).is_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activation_estimate_equals_autograd_saved_tensors(kind: str, dtype: torch.dtype) -> None:
    """Saved parameters do not count as activations. The arithmetic omits rotary angles and norm scales."""
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


def test_fit_constants_equal_trainer_constants() -> None:
    assert lm_head.CHUNK_BYTES["cuda"] == trainer_memory.HEAD_CHUNK_BYTES
    assert "cuda" not in lm_head.KEPT_BYTES  # residuals use only free memory, so no estimate counts them


def test_multimodal_model_maps_to_trained_text_type() -> None:
    """Compare all architectures in transformers whose text model the trainer can shard."""
    seen = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind)
        except Exception:  # the default configuration cannot be built
            continue
        text = config.get_text_config()
        if text is config or text.model_type not in FAMILIES:
            continue
        trained = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class.model_type
        seen[kind] = (trained, from_config(config.to_dict()).trained_type)
    assert "gemma3" in seen
    assert all(trained == found for trained, found in seen.values()), seen
