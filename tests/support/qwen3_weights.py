"""Complete weights of a small Qwen 3 by its configuration, written without torch for tests of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES: Mapping[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
QWEN3: Mapping[str, Any] = {**SIZES, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def write_qwen3_weights(folder: Path) -> None:
    """Write zeros for each tensor of `QWEN3` to `model.safetensors`."""
    hidden, width, head = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * head, SIZES["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    shapes = {
        "model.embed_tokens": (SIZES["vocab_size"], hidden),
        "lm_head": (SIZES["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    for index in range(SIZES["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
