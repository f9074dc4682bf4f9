"""Names of layers that can have an adapter."""

from __future__ import annotations

from collections.abc import Mapping

MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's layer names -> names in transformers."""
ALL_LINEAR = ("all-linear", "all")
"""Other trainers' names for all linear layers, which is RLRun's default."""
