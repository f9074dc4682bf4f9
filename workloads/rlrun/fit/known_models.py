"""Shapes of well-known models, from their published configurations, for machines without access to the hub."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.fit.architecture import Architecture

_SUFFIXES = ("-Base", "-Instruct", "-Instruct-2507", "-Thinking-2507")
"""Name endings of models with the same shape as the model without the ending."""


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False) -> Architecture:
    return Architecture("qwen3", hidden, layers, heads, 8, 128, intermediate, 151_936, tied)


def _qwen2(
    hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, *, tied: bool = False
) -> Architecture:
    return Architecture("qwen2", hidden, layers, heads, kv, hidden // heads, intermediate, vocabulary, tied)


def _llama(hidden: int, layers: int, heads: int, dim: int, intermediate: int, *, tied: bool = False) -> Architecture:
    return Architecture("llama", hidden, layers, heads, 8, dim, intermediate, 128_256, tied)


def _qwen3_moe(hidden: int, layers: int, heads: int, intermediate: int, of_expert: int) -> Architecture:
    return Architecture(
        "qwen3_moe",
        hidden,
        layers,
        heads,
        4,
        128,
        intermediate,
        151_936,
        experts=128,
        experts_per_token=8,
        expert_intermediate=of_expert,
    )


KNOWN: Mapping[str, Architecture] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12_288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17_408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25_600),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 12_288, 1536),
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151_936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11_008, 151_936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18_944, 152_064),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13_824, 152_064),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27_648, 152_064),
    "Qwen/Qwen2.5-Math-7B": _qwen2(3584, 28, 28, 4, 18_944, 152_064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151_936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(3584, 28, 28, 4, 18_944, 152_064),
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 32, 64, 8192, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 24, 128, 8192, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 32, 128, 14_336),
    "meta-llama/Llama-3.1-70B": _llama(8192, 80, 64, 128, 28_672),
}


def known_model(name: str) -> Architecture | None:
    """Return the shape of a hub model, or None if it is not in the table."""
    plain = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    return KNOWN.get(name) or KNOWN.get(plain)
