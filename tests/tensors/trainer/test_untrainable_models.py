"""Refusals by `config.json`, compared with the measured architecture table and transformers' configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlrun.config.families import training_refusal
from rlrun.config.quantization import quantization_method
from tests.support.sets import few_in_gate
from tools.docs_models import read_results

_GATE = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "minimax_m2",
    "gemma3",
    "got_ocr2",
    "qwen3_next",
    "lfm2",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "internvl",
)
_TYPES = read_results("architectures")["types"]


def _content(kind: str) -> dict[str, Any]:
    try:
        return dict(CONFIG_MAPPING[kind]().to_dict())
    except Exception as error:
        pytest.skip(f"transformers makes no default configuration: {type(error).__name__}")


@pytest.mark.parametrize("kind", few_in_gate(sorted(_TYPES), _GATE))
def test_refusal_agrees_with_the_measured_table(kind: str) -> None:
    refusal, found = training_refusal(_content(kind), kind), _TYPES[kind]
    if found.get("by_config"):
        assert refusal is not None
        assert "images or sound" in refusal
    elif "logprob" in found:
        assert refusal is None


@pytest.mark.parametrize(
    ("name", "options", "method"),
    [
        ("Mxfp4Config", {}, "mxfp4"),
        ("FineGrainedFP8Config", {}, "fp8"),
        ("AwqConfig", {}, "awq"),
        ("GPTQConfig", {"bits": 4}, "gptq"),
        ("BitsAndBytesConfig", {"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_transformers_quantization_configs_are_recognized(name: str, options: dict[str, Any], method: str) -> None:
    content = json.loads(getattr(transformers, name)(**options).to_json_string(use_diff=False))
    assert quantization_method({"quantization_config": content}) == method
