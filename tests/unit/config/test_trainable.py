"""Recognition of models that cannot be trained, from published configurations and names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlrun.config.families import (
    quantization_method,
    quantization_note,
    refusal_by_name,
    training_refusal,
    unquantised_name,
)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "quantization_config": None},
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"depth": 1}},
        {"model_type": "minimax_m2"},
        {"model_type": "nemotron"},
        {},
    ],
)
def test_trainable_configurations_are_not_refused(config: Mapping[str, object]) -> None:
    assert training_refusal(config, "m") is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 3}}, "an unknown method"),
    ],
)
def test_quantization_is_found_in_each_place(config: Mapping[str, object], method: str) -> None:
    assert quantization_method(config) == method
    assert f"({method}" in str(training_refusal(config, "m"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("openai/gpt-oss-20b", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3", "fp8"),
        ("deepseek-ai/DeepSeek-V3-0324", "fp8"),
        ("deepseek-ai/DeepSeek-R1-0528", "fp8"),
        ("moonshotai/Kimi-K2-Instruct", "fp8"),
        ("moonshotai/Kimi-K2-Thinking", "compressed-tensors"),
        ("MiniMaxAI/MiniMax-M2", "fp8"),
    ],
)
def test_published_repository_is_refused_by_its_name(name: str, method: str) -> None:
    assert f"{name} is quantized ({method}" in str(refusal_by_name(name))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "deepseek-ai/deepseek-llm-7b-base",
        "me/gpt-oss-20b-bf16",
        "Qwen/Qwen3-8B",
    ],
)
def test_other_repository_is_not_refused_by_its_name(name: str) -> None:
    assert refusal_by_name(name) is None
    assert quantization_note(name) is None


def test_quantised_name_leads_to_the_repository_before_it() -> None:
    assert unquantised_name("Qwen/Qwen3-8B-FP8") == "Qwen/Qwen3-8B"
    assert unquantised_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4") == "Qwen/Qwen2.5-7B-Instruct"
    assert "use Qwen/Qwen3-8B" in str(quantization_note("Qwen/Qwen3-8B-FP8"))
    config = {"quantization_config": {"quant_method": "fp8"}}
    assert "use Qwen/Qwen3-8B, or" in str(training_refusal(config, "Qwen/Qwen3-8B-FP8"))
