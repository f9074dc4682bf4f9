"""Untrainable models, with the configurations that their authors publish."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tests.processes.cli.mistakes.mistake import Mistake, field_of_spec


def _model(what: str, value: str, fix: str, config: Mapping[str, object]) -> Mistake:
    files = {"m/config.json": json.dumps(config), "m/model.safetensors": "", "m/tokenizer.json": "{}"}
    return field_of_spec(what, "model: {path: m}", "spec.model.path", value, fix, files=files)


MODELS: Sequence[Mistake] = (
    _model(
        "Kimi K2 Thinking as published",
        "compressed-tensors",
        "bfloat16",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "quantization_config": {
                "config_groups": {
                    "group_0": {
                        "input_activations": None,
                        "output_activations": None,
                        "targets": ["Linear"],
                        "weights": {
                            "actorder": None,
                            "block_structure": None,
                            "dynamic": False,
                            "group_size": 32,
                            "num_bits": 4,
                            "observer": "minmax",
                            "observer_kwargs": {},
                            "strategy": "group",
                            "symmetric": True,
                            "type": "int",
                        },
                    }
                },
                "format": "pack-quantized",
                "ignore": ["lm_head"],
                "kv_cache_scheme": None,
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
            },
        },
    ),
    _model(
        "an AWQ repository",
        "awq",
        "bfloat16",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "quantization_config": {
                "bits": 4,
                "group_size": 128,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            },
        },
    ),
    _model(
        "a GPTQ repository",
        "gptq",
        "bfloat16",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "quantization_config": {
                "bits": 4,
                "damp_percent": 0.01,
                "desc_act": False,
                "group_size": 128,
                "quant_method": "gptq",
                "static_groups": False,
                "sym": True,
                "true_sequential": True,
            },
        },
    ),
    _model(
        "a bitsandbytes repository",
        "bitsandbytes",
        "bfloat16",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "quantization_config": {
                "_load_in_4bit": True,
                "_load_in_8bit": False,
                "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_quant_storage": "uint8",
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "llm_int8_enable_fp32_cpu_offload": False,
                "llm_int8_has_fp16_weight": False,
                "llm_int8_skip_modules": None,
                "llm_int8_threshold": 6.0,
                "load_in_4bit": True,
                "load_in_8bit": False,
                "quant_method": "bitsandbytes",
            },
        },
    ),
    _model(
        "a vision model of another family",
        "glm4v",
        "Qwen/Qwen3-VL",
        {
            "architectures": ["Glm4vForConditionalGeneration"],
            "model_type": "glm4v",
            "text_config": {"model_type": "glm4v_text"},
            "vision_config": {"depth": 24},
        },
    ),
)
