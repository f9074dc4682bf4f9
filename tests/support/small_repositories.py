"""Small repositories of published shapes that know a part of the task reverse-text, so that a run on a CPU improves them in minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlrun.environments.demonstrations import collect_demonstrations
from rlrun.trainer.modeling.tiny_model import encode_demonstration, make_tokenizer
from tests.support.quantized_models import quantize_files

BATCH = 64
"""Demonstrations per supervised step."""
MOST_STEPS = 150
ACCURACY = 0.65
"""Mean probability of the correct character at which supervised training ends; the reward is then about 0.5 (measured)."""
RATE = 1e-3
IGNORED = -100
STEP_REPLAY: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32"},
    "trainer": {"router": {"replay": "Step"}, "updatesPerStep": 2},
    "algorithm": {"preset": "decoupled_ppo"},
}
"""Fields of a manifest, by block, that replay the experts of a mixture in both updates of a step."""
STEP_REPLAY_MISMATCH = 1e-2
"""Largest KL divergence between trainer and engine in the first step, in nats per token. Measured: 1.6e-3, because the second update
measures its policy after the first one.
"""


def make_qwen3_5(folder: Path) -> None:
    """Write a hybrid with an encoder of images, as Qwen 3.5 is published: one layer of linear attention, one of full attention.

    Heads of linear attention are 64 wide, because vLLM's kernel for CPUs supports only 64 and 128.
    """
    tokenizer = make_tokenizer()
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
        "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    _write(Qwen3_5ForConditionalGeneration(config), tokenizer, folder)


def make_gpt_oss(folder: Path) -> None:
    """Write a mixture of four experts whose files are in MXFP4, as GPT-OSS is published."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    _write(GptOssForCausalLM(config), tokenizer, folder)
    quantize_files(folder, "mxfp4", ("experts.gate_up_proj", "experts.down_proj"))


def make_qwen3_moe(folder: Path) -> None:
    """Write a mixture of four experts, two for each token, as Qwen 3 is published."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, moe_intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    _write(Qwen3MoeForCausalLM(config), tokenizer, folder)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Train the model on demonstrations of reverse-text, and write it with its tokenizer."""
    known = collect_demonstrations("reverse-text", {}, MOST_STEPS * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(MOST_STEPS):
        pairs = [encode_demonstration(tokenizer, chat) for chat in known[step * BATCH : (step + 1) * BATCH]]
        ids, labels = _pad(pairs)
        logits = model(input_ids=ids).logits
        wanted = labels[:, 1:].flatten()
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), wanted, ignore_index=IGNORED, reduction="none")
        losses = losses[wanted != IGNORED]
        reached = float((-losses.detach()).exp().mean())
        if reached >= ACCURACY:
            break
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pad(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, `[B, T]`."""
    longest = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in pairs])
    return ids, torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in pairs])
