"""Tiny models of every sharded family, with windows, caps and scales that affect short sequences."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlrun.config.families import FAMILIES
from rlrun.trainer.modeling.noise import remove_noise

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_MIXTURE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_HEADS = {"head_dim": 8}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_MULTIPLIED = {
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
_CAPPED = (
    _HEADS | _ALTERNATING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
)
_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Queries grow with their positions from the eighth position on."""
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, **_ALTERNATING},
    "qwen3": _HEADS,
    "mistral": {"sliding_window": 6, **_HEADS},
    "ministral": _HEADS | _ALTERNATING,
    "ministral3": _HEADS | {"sliding_window": 6, "rope_parameters": _SCALED},
    "gemma": _HEADS,
    "gemma2": _CAPPED,
    "vaultgemma": _CAPPED,
    "gemma3_text": _HEADS | _ALTERNATING | {"query_pre_attn_scalar": 16},
    "granite": _MULTIPLIED,
    "olmo": {"clip_qkv": 1.0},
    "olmo3": _ALTERNATING,
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 6},
    "helium": {"head_dim": 4},
    "arcee": _HEADS,
    "seed_oss": _HEADS | {"attention_out_bias": True},
    "ernie4_5": _HEADS | {"use_bias": True},
    "cwm": _HEADS | _ALTERNATING,
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": _HEADS | _ALTERNATING | {"logit_scale": 0.25},
    "jais2": _HEADS,
    "exaone4": _HEADS | _ALTERNATING,
    "hunyuan_v1_dense": _HEADS,
    "hyperclovax": _HEADS | {"use_post_norm": True},
    "glm": _HEADS | {"attention_bias": True},
    "glm4": _HEADS | {"attention_bias": True},
    "phi3": {"sliding_window": 6},
    "phi": {"qk_layernorm": True},
    "starcoder2": {"sliding_window": 6},
    "qwen3_moe": _MIXTURE | _HEADS | {"mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": _MIXTURE | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "glm4_moe": _MIXTURE | _ROUTED | _HEADS | {"use_qk_norm": True, "attention_bias": True},
    "dots1": _MIXTURE | _ROUTED | _HEADS,
    "gpt_oss": _HEADS | _ALTERNATING | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": _MIXTURE | _ROUTED | _LATENT,
    "deepseek_v3": _MIXTURE | _ROUTED | _LATENT,
    "glm4_moe_lite": _MIXTURE | _ROUTED | _LATENT,
    "youtu": _LATENT | {"pad_token_id": None},  # transformers sets its padding row to 0 when it reads the files
    "bitnet": {},
    "gpt_neox": {"hidden_dropout": 0.0},
    "apertus": {},
    "nanochat": {"final_logit_softcapping": 5.0},
    "granitemoe": _MULTIPLIED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": _MULTIPLIED
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    "granite_swa": _MULTIPLIED | _ALTERNATING,
    "mimo_v2_flash": _MIXTURE
    | _ROUTED
    | _ALTERNATING
    | {"head_dim": 12, "v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "gemma4_text": _ALTERNATING
    | {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": _HEADS | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mellum": _MIXTURE | _HEADS | _ALTERNATING,
    "cohere2_moe": _MIXTURE | _HEADS | _ALTERNATING | {"logit_scale": 0.25},
    "solar_open": _MIXTURE | _ROUTED | _HEADS,
    "ernie4_5_moe": {
        "moe_intermediate_size": 24,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hy_v3": _MIXTURE | _HEADS | {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "exaone_moe": _MIXTURE | _ROUTED | _HEADS | _ALTERNATING | {"num_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "afmoe": _MIXTURE | _HEADS | _ALTERNATING | {"num_shared_experts": 1, "num_dense_layers": 1, "mup_enabled": True},
    "laguna": _MIXTURE
    | _HEADS
    | _ALTERNATING
    | {"shared_expert_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]},
}
"""Changes to the common sizes, by model type."""


def layouts_of(kind: str) -> dict[int, list[str]]:
    """Return the layout names of a family (`tests.trainer.layouts.LAYOUTS`), by number of ranks."""
    by = FAMILIES[kind].by
    found: dict[int, list[str]] = {2: [], 4: []}
    if "tp" in by:
        found[2] += ["tp2"]
        found[4] += ["tp4", "tp2xfsdp2", "tp2xcp2"]
    if "cp" in by:
        found[2] += ["cp2"]
        found[4] += ["cp4", "cp2xfsdp2"]
    if "ep" in by:
        found[4] += ["ep2xtp2", "ep4"]
    return found


def make_model(kind: str, seed: int, **sizes: int) -> Any:
    """Build a model with random weights and other `sizes`; no norm or bias is neutral, because that would hide a
    gradient that is counted twice.
    """
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**(_COMMON | OPTIONS.get(kind, {}) | sizes))
    remove_noise(config)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
