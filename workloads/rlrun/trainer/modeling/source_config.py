"""Configuration of a model's source, as the trainer uses it: without quantization, because all tensors are read as plain ones."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from rlrun.config.models.language_models import ModelConfig
from rlrun.trainer.modeling.noise import config_parts


def source_config(config: ModelConfig, source: str) -> PreTrainedConfig:
    """Read the configuration of a model. With `quantization_config`, transformers and vLLM would look for quantized tensors.

    Args:
        config: revision of the model, and trust in its code.
        source: folder or name on the hub.
    """
    found: PreTrainedConfig = AutoConfig.from_pretrained(
        source, revision=config.revision or "main", trust_remote_code=config.trust_remote_code
    )
    for part in config_parts(found):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return found
