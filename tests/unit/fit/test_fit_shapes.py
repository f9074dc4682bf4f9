"""Model shapes and GPU sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.fit.architecture import KNOWN, ShapeError, from_config, known_model
from rlrun.fit.memory_parts import GIB, MIB, layer_activations, memory_of, parse_size
from rlrun.fit.model_sources import UnknownModelError, shape_of

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
}
"""Number of elements in the published files of the models."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_published_parameter_counts(name: str) -> None:
    assert KNOWN[name].parameters == PUBLISHED[name]


def test_known_model_variants_share_its_shape() -> None:
    assert known_model("Qwen/Qwen3-4B-Instruct-2507") == KNOWN["Qwen/Qwen3-4B"]
    assert known_model("Qwen/Qwen3-4B-Other") is None


def test_layer_activations_match_design() -> None:
    """KB per token in a layer of Qwen3-0.6B, bfloat16, as measured on the real model."""

    def kept(mode: Any) -> float:
        shape = KNOWN["Qwen/Qwen3-0.6B"]
        return layer_activations(shape, mode, number_bytes=2, tp=1, compiled=False).kept / 1024

    assert [round(kept(mode), 1) for mode in ("none", "selective", "attention", "full", "offload")] == [
        70.1,
        30.1,
        6.1,
        2.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("product", "mib"),
    [
        ("NVIDIA-H100-80GB-HBM3", 81_559),
        ("NVIDIA-H100-NVL", 95_830),
        ("NVIDIA-A100-SXM4-40GB", 40_960),
        ("NVIDIA-A100-80GB-PCIe", 81_920),
        ("Tesla-V100-SXM2-16GB", 16_160),
        ("NVIDIA-L40S", 46_068),
        ("NVIDIA-A10", 23_028),
        ("NVIDIA-GeForce-RTX-4090", 24_564),
        ("H200", 143_771),
        ("NVIDIA-H20", 97_871),
        ("NVIDIA-H800", 81_559),
        ("NVIDIA-GB200", 189_471),
        ("NVIDIA-B300-SXM6-AC", 275_040),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", 97_887),
    ],
)
def test_memory_of_a_product(product: str, mib: int) -> None:
    assert memory_of(product) == mib * MIB


@pytest.mark.parametrize(
    "product", ["NVIDIA-X1", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "NVIDIA-L4-SHARED", "NVIDIA-A100"]
)
def test_memory_of_unknown_or_partial_gpu_is_unknown(product: str) -> None:
    assert memory_of(product) is None


def test_sizes_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("80Gi", "1.5Gi", "10Mi", "24GB")] == [
        80 * GIB,
        1.5 * GIB,
        10 * MIB,
        24 * 10**9,
    ]
    for wrong in ("80", "Gi", "0Gi", "-1Gi", "80Ki"):
        with pytest.raises(ValueError, match="not a size of memory"):
            parse_size(wrong)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "64", True])
def test_configuration_without_size_is_refused(field: str, value: object) -> None:
    with pytest.raises(ShapeError, match=field):
        from_config(CONFIG | {field: value})


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}, (64, 2, 4, 256)),  # GPT-2
        ({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96}, (64, 2, 4, 96)),  # OPT
        # Gemma 3n has a width for every layer.
        (
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": [96, 128]},
            (64, 2, 4, 128),
        ),
    ],
)
def test_size_names_of_families_are_recognized(config: dict[str, Any], sizes: tuple[int, ...]) -> None:
    found = from_config({"model_type": "other", "vocab_size": 100} | config)
    assert (found.hidden, found.layers, found.heads, found.intermediate) == sizes


@pytest.mark.parametrize(
    "names",
    [
        {"num_experts": 8, "moe_topk": [2, 2]},  # Hunyuan
        {"moe_num_experts": 8, "moe_k": 2},  # ERNIE
    ],
)
def test_mixture_size_names_of_families_are_recognized(names: dict[str, Any]) -> None:
    mixture = {name: value for name, value in CONFIG.items() if name != "intermediate_size"} | {
        "moe_intermediate_size": 24
    }
    found = from_config(mixture | {"model_type": "other"} | names)
    assert (found.experts, found.experts_per_token, found.expert_intermediate) == (8, 2, 24)


@pytest.mark.parametrize("option", [{"attention_bias": True}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_unusual_options_make_count_inexact(option: dict[str, Any]) -> None:
    assert from_config(CONFIG).is_exact
    assert not from_config(CONFIG | option).is_exact


def test_multimodal_model_count_is_inexact() -> None:
    assert not from_config({"model_type": "other", "text_config": CONFIG}).is_exact


def test_shape_is_read_from_each_model_source(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--team--own" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    expected = from_config(CONFIG)
    assert shape_of(ModelConfig(path=str(folder)), "spec.model") == expected
    assert shape_of(ModelConfig(name="team/own"), "spec.model", environment={"HF_HOME": str(tmp_path)}) == expected
    assert shape_of(ModelConfig(tiny=TinyModelConfig()), "spec.model").layers == 4


def test_unknown_model_error_names_model_config_option(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"spec\.model\.name \(a/b\).*--model-config"):
        shape_of(ModelConfig(name="a/b"), "spec.model", environment={"HF_HOME": str(tmp_path)})
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UnknownModelError, match=r"spec\.model\.path"):
        shape_of(ModelConfig(path=str(tmp_path)), "spec.model")
