"""Recognition of models that cannot be trained, from published configurations and names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlrun.config.families import (
    choose_state_dtype,
    quantization_note,
    refusal_by_name,
    training_refusal,
    unquantized_name,
)
from rlrun.config.quantization import Quantization, UnreadableFormatError, quantization_method, read_quantization


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "quantization_config": None},
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"depth": 1}},
        {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}, "vision_config": {"depth": 27}},
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {"hidden_size": 1024}},
        {"model_type": "minimax_m2"},
        {"model_type": "nemotron"},
        {"model_type": "qwen3_next", "linear_num_value_heads": 32},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {},
    ],
)
def test_trainable_configurations_are_not_refused(config: Mapping[str, object]) -> None:
    assert training_refusal(config, "m") is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "m has an encoder and a decoder (t5, is_encoder_decoder in"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
            "(Qwen3ForSequenceClassification,",
        ),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "m is not a causal language model"),
        ({"model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"]}, "m is not a causal language model"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "m is not a causal language model"),
        (
            {"model_type": "t5", "architectures": ["T5EncoderModel"]},
            "m is not a causal language model (T5EncoderModel,",
        ),
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            "m is a model without a head, such as an embedding model",
        ),
    ],
)
def test_model_that_is_not_a_causal_language_model_is_refused(config: Mapping[str, object], reason: str) -> None:
    told = training_refusal(config, "m")
    assert told is not None
    assert reason in told
    assert told.endswith("such as Qwen/Qwen3-8B")
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    assert training_refusal({**config, **own}, "m") is None
    assert training_refusal(config, "m", own_class=True) is None


@pytest.mark.parametrize(
    ("kind", "base", "causal"),
    [
        ("qwen3", "Qwen3Model", "Qwen3ForCausalLM"),
        ("gemma3_text", "Gemma3TextModel", "Gemma3ForCausalLM"),
        ("qwen3_next", "Qwen3NextModel", "Qwen3NextForCausalLM"),
    ],
)
def test_base_class_of_a_language_model_is_refused_with_its_causal_class(kind: str, base: str, causal: str) -> None:
    config = {"model_type": kind, "architectures": [base]}
    refusal = str(training_refusal(config, "m"))
    assert f"train it as {causal}, if its files have a head: set architectures" in refusal
    assert refusal.endswith(f'to ["{causal}"]')
    assert f"train it as {causal}: set" in str(training_refusal({**config, "tie_word_embeddings": True}, "m"))


def test_base_class_with_images_is_refused_with_its_class_for_images() -> None:
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLModel"], "vision_config": {"depth": 27}}
    assert "train it as Qwen3VLForConditionalGeneration" in str(training_refusal(config, "m"))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3VLForConditionalGeneration"])
def test_class_of_a_causal_language_model_is_not_refused(name: str) -> None:
    assert training_refusal({"model_type": "llama", "architectures": [name], "is_encoder_decoder": False}, "m") is None


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"model_type": "qwen3_next"}, "float32"),
        ({"model_type": "new", "text_config": {"layer_types": ["linear_attention", "full_attention"]}}, "float32"),
        ({"model_type": "nemotron_h", "mamba_ssm_cache_dtype": "float16"}, None),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}}, None),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, None),
    ],
)
def test_state_of_hybrid_is_float32_in_engines_unless_the_model_sets_it(
    config: Mapping[str, object], dtype: str | None
) -> None:
    assert choose_state_dtype(config) == dtype


@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        ("glm4v", "vision_config"),
        ("kimi_k25", "vision_config"),
        ("qwen2_audio", "audio_config"),
        ("llava_qwen2", "mm_vision_tower"),
    ],
)
def test_model_with_another_encoder_is_refused_by_name(kind: str, encoder: str) -> None:
    refusal = str(training_refusal({"model_type": kind, encoder: {"depth": 2}}, "m"))
    assert f"m is a model for images or sound ({kind}, {encoder} in config.json)" in refusal
    assert "use one of these, such as Qwen/Qwen3-VL-8B-Instruct" in refusal


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_FP8, Quantization("fp8", (128, 128))),
        (_FP8 | {"weight_block_size": [1, 128], "fmt": "e4m3"}, Quantization("fp8", (1, 128))),
        (
            _FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},
            Quantization("fp8", (128, 128)),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Quantization("fp8", None)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Quantization("mxfp4")),
    ],
)
def test_format_that_the_trainer_reads_is_not_refused(content: Mapping[str, object], expected: Quantization) -> None:
    for config in ({"quantization_config": content}, {"text_config": {"quantization_config": content}}):
        assert read_quantization(config) == expected
        assert training_refusal(config, "m") is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"bits": 3}}, "an unknown method"),
    ],
)
def test_format_that_is_not_read_is_refused_by_name(config: Mapping[str, object], method: str) -> None:
    assert quantization_method(config) == method
    with pytest.raises(UnreadableFormatError, match=f"the format {method} is not read"):
        read_quantization(config)
    refusal = str(training_refusal(config, "m"))
    assert f"m is quantized, and the format {method} is not read" in refusal
    assert "the trainer reads FP8" in refusal
    assert "use a repository with its weights in bfloat16" in refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "fp8 with fmt e5m2 is not read, only e4m3"),
        ({"weight_block_size": [128]}, r"weight_block_size \[128\] is not read"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\] is not read"),
        ({"weight_block_size": 128}, "weight_block_size 128 is not read"),
    ],
)
def test_unknown_layout_of_fp8_is_refused(changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(UnreadableFormatError, match=message):
        read_quantization({"quantization_config": _FP8 | changes})


def test_published_repository_in_a_format_that_is_not_read_is_refused_by_its_name() -> None:
    assert "and the format compressed-tensors is not read" in str(refusal_by_name("moonshotai/Kimi-K2-Thinking"))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "deepseek-ai/deepseek-llm-7b-base",
        "me/gpt-oss-20b-bf16",
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V3",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3-8B",
    ],
)
def test_other_repository_is_not_refused_by_its_name(name: str) -> None:
    assert refusal_by_name(name) is None
    assert quantization_note(name) is None


def test_quantized_name_leads_to_the_repository_before_it() -> None:
    assert unquantized_name("Qwen/Qwen3-8B-FP8") == "Qwen/Qwen3-8B"
    assert unquantized_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4") == "Qwen/Qwen2.5-7B-Instruct"
    assert "use Qwen/Qwen3-8B" in str(quantization_note("Qwen/Qwen3-8B-AWQ"))
    config = {"quantization_config": {"quant_method": "awq"}}
    assert "use Qwen/Qwen3-8B, or" in str(training_refusal(config, "Qwen/Qwen3-8B-AWQ"))
