"""The model and the rows that are measured, and their work: those of Qwen3-0.6B, or tiny ones for a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder of the Qwen3 family."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    longest: int

    def config(self) -> dict[str, Any]:
        """`config.json` for transformers."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.longest,
            "tie_word_embeddings": True,
        }

    def products(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of the matrix products of a layer and the head, alone and joined."""
        q, kv = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        return {
            "q": (self.hidden, q),
            "k or v": (self.hidden, kv),
            "o": (q, self.hidden),
            "gate or up": (self.hidden, self.intermediate),
            "down": (self.intermediate, self.hidden),
            "q, k, v joined": (self.hidden, q + 2 * kv),
            "gate, up joined": (self.hidden, 2 * self.intermediate),
            "head": (self.hidden, self.vocabulary),
        }


QWEN3_06B = Shape(151_936, 1024, 3072, 28, 16, 8, 128, 131_072)
TINY = Shape(503, 64, 96, 2, 4, 2, 16, 512)

ROWS: Mapping[str, Sequence[int]] = {
    "16k": (16_384,),
    "65k": (65_536,),
    "8k": (8_192,),
    "16 x 4k": (4_096,) * 16,
    "mixed": (16_384, 12_288, 8_192, 8_192, 4_096, 4_096, 4_096, 3_072, 2_048, 1_024, 1_024, 1_024),
}
"""Lengths of the sequences of a row; mixed: 12 of them, 1k to 16k, 65,536 tokens."""
TINY_ROWS: Mapping[str, Sequence[int]] = {"64": (64,), "4 x 16": (16,) * 4, "mixed": (31, 17, 9, 5, 1, 1)}


def attention_flops(shape: Shape, lengths: Sequence[int]) -> tuple[float, float]:
    """FLOPs of causal attention of one layer, forward and backward: two and five products of half a square (FlashAttention-2, 2023)."""
    forward = 2.0 * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    return forward, 2.5 * forward


def write_model(folder: Path, shape: Shape) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder
