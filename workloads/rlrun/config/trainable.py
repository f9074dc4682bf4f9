"""Models that the trainer cannot train, recognized by their `config.json` or hub name, with an alternative for each. Pure.

The trainer checks all other models itself (`trainer.modeling.architecture_check`), but only after loading: a quantized repository cannot
be loaded, and a hybrid model would have to be downloaded first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

_STATES = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
        "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv",
        "xlstm", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""Model types with layers that carry state from one sequence of a row into the next."""
_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "lightning"})
"""Entries of `layer_types` for such layers."""
_STATE_FIELDS = (
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "ssm_cfg",
    "mamba_d_state",
    "conv_L_cache",
)
_ENCODERS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "vision_encoder", "speech_config")
"""Fields of the configuration for encoders of images and sound."""
_TEXT_OF = frozenset({"gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "phi4_multimodal"})
"""Types with encoders of which only the text part is loaded, as a causal language model."""
_METHODS: Mapping[str, str] = {"compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes"}
_AS_PUBLISHED: tuple[tuple[str, str], ...] = (
    ("openai/gpt-oss-20b", "mxfp4"),
    ("openai/gpt-oss-120b", "mxfp4"),
    ("deepseek-ai/deepseek-v3", "fp8"),
    ("deepseek-ai/deepseek-v3-*", "fp8"),
    ("deepseek-ai/deepseek-v3.1*", "fp8"),
    ("deepseek-ai/deepseek-v3.2*", "fp8"),
    ("deepseek-ai/deepseek-r1", "fp8"),
    ("deepseek-ai/deepseek-r1-0528", "fp8"),
    ("deepseek-ai/deepseek-r1-zero", "fp8"),
    ("moonshotai/kimi-k2-thinking", "compressed-tensors"),
    ("moonshotai/kimi-k2-*", "fp8"),
    ("minimaxai/minimax-m2*", "fp8"),
)
"""Repositories that their authors publish quantized, in lower case, with the method."""
_SUFFIXES = (
    "-fp8",
    "-fp8-dynamic",
    "-awq",
    "-gptq",
    "-gptq-int4",
    "-gptq-int8",
    "-bnb-4bit",
    "-unsloth-bnb-4bit",
    "-mxfp4",
    "-nvfp4",
    "-gguf",
    "-int4",
    "-int8",
)
"""Name endings of quantized repositories. The name without the ending is that of the original repository."""
DEQUANTIZE = "docs/models.md#quantised-repositories"


def training_refusal(config: Mapping[str, object], shown: str) -> str | None:
    """Return why the trainer cannot train a model, with a fix, or None if no reason is known.

    Args:
        config: content of the model's `config.json`.
        shown: folder or name of the model for messages.
    """
    kind = str(config.get("model_type") or "")
    method = quantization_method(config)
    if method is not None:
        return _is_quantized(shown, method)
    if has_state(config):
        return (
            f"{shown} is a hybrid model ({kind}): its layers carry state across the sequences of a row, which the trainer does not "
            "support; use a model with only attention layers, such as Qwen/Qwen3-8B, or evaluate this model with task: Eval"
        )
    encoder = next((name for name in _ENCODERS if config.get(name)), None)
    if encoder is not None and kind not in _TEXT_OF:
        return (
            f"{shown} is a model for images or sound ({kind}, {encoder} in config.json), but only text models can be trained; use a text "
            "model of its family, such as Qwen/Qwen3-8B"
        )
    return None


def refusal_by_name(name: str) -> str | None:
    """Return the reason of `training_refusal` for a repository that is published quantized, by its name only."""
    method = next((method for pattern, method in _AS_PUBLISHED if fnmatch(name.lower(), pattern)), None)
    return None if method is None else _is_quantized(name, method)


def quantization_note(name: str) -> str | None:
    """Return a note if a repository's name indicates quantized weights, or None."""
    base = unquantised_name(name)
    if base is None:
        return None
    return f"{name} appears to be quantized by its name, and the trainer refuses quantized weights; use {base}"


def quantization_method(config: Mapping[str, object]) -> str | None:
    """Return the quantization method of a model's weights, or None if they are not quantized."""
    for part in _config_parts(config):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, Mapping):
            method = found.get("quant_method")
            if method:
                return _METHODS.get(str(method), str(method))
            return "bitsandbytes" if found.get("load_in_4bit") or found.get("load_in_8bit") else "an unknown method"
    return None


def has_state(config: Mapping[str, object]) -> bool:
    """Return whether layers of a model carry state past the end of a sequence."""
    for part in _config_parts(config):
        layers = part.get("layer_types")
        kinds = {str(layer) for layer in layers} if isinstance(layers, list) else set()
        if part.get("model_type") in _STATES or kinds & _STATE_LAYERS or any(part.get(name) for name in _STATE_FIELDS):
            return True
    return False


def unquantised_name(name: str) -> str | None:
    """Return the probable name of the repository that a quantized repository was made from, or None if the name has no such ending."""
    found = [end for end in _SUFFIXES if name.lower().endswith(end)]
    return name[: -len(max(found, key=len))] if found else None


def _config_parts(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a configuration, and the configuration of its text part."""
    yield config
    text = config.get("text_config") or config.get("language_config") or config.get("llm_config")
    if isinstance(text, Mapping):
        yield text


def _is_quantized(shown: str, method: str) -> str:
    base = unquantised_name(shown)
    other = base if base is not None else "a repository with its weights in bfloat16"
    return (
        f"{shown} is quantized ({method}, quantization_config in config.json), but the trainer needs weights in bfloat16, float16 or "
        f"float32; use {other}, or convert it to bfloat16 first ({DEQUANTIZE})"
    )
