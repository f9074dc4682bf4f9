"""Versions of large models as the trainer divides them: buckets, bytes by root, and computed seconds for given links.

    python -m benchmarks.hand_over [--write]

Tensors, buckets and estimate are those of the product (`weights.bucketing.bucket_layout`, `protocol.messages.buckets`),
for models without memory. Nothing is sent and nothing is measured; a test on gloo
(`tests/trainer/test_weight_transfer.py`) checks that each engine receives every bit. `--write` writes the table to
benchmarks/results/hand_over.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results_page import run_page
from rlrun.fit.architecture import KNOWN, Architecture
from rlrun.protocol.messages.buckets import BUCKET_BYTES, TensorInfo, estimate_hand_over, plan_buckets, root_ranks
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.weights.bucketing import bucket_layout

RESULTS = Path(__file__).parent / "results" / "hand_over.md"
MODELS = ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-235B-A22B")
RANKS = (1, 8, 64)
GB = 1e9
LINKS = {"10 Gbit/s Ethernet": 1.25 * GB, "100 Gbit/s": 12.5 * GB, "400 Gbit/s": 50 * GB}
"""Bytes per second of one network card."""
CARDS = 8
"""Network cards of an engine's machine; on the trainer's machines each root has one."""
LATENCY = 1e-4
"""Latency of one broadcast in seconds, without its bytes."""


def config_of(shape: Architecture) -> Any:
    """Return the transformers configuration of a known shape."""
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        sizes |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_intermediate,
        }
    return AutoConfig.for_model(shape.model_type, **sizes)


def tensors_of(shape: Architecture) -> list[TensorInfo]:
    """Return the tensors of a version of a model of this shape, in bfloat16, in their published order."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    remember_names(model)
    return bucket_layout(model, "bfloat16")


def rows(name: str, shape: Architecture) -> Iterable[str]:
    """Return lines of one model's table, by ranks of the trainer."""
    tensors = tensors_of(shape)
    for ranks in RANKS:
        roots = len(root_ranks(ranks))
        buckets = plan_buckets(tensors, roots=roots)
        found = {
            link: estimate_hand_over(
                buckets,
                send_bytes_per_second=speed,
                receive_bytes_per_second=speed * CARDS,
                seconds_per_bucket=LATENCY,
            )
            for link, speed in LINKS.items()
        }
        one = next(iter(found.values()))
        seconds = " | ".join(f"{each.seconds:.2f}" for each in found.values())
        yield (
            f"| {name} | {len(tensors):,} | {one.total / GB:.2f} | {one.buckets} | {one.largest / 2**20:.0f} | {ranks} | {roots} "
            f"| {one.kept / GB:.2f} | {seconds} |"
        )


def table() -> str:
    """Return all models as Markdown."""
    links = " | ".join(f"s at {link}" for link in LINKS)
    return "\n".join(
        [
            "# A version of a large model in buckets, by arithmetic",
            "",
            "`python -m benchmarks.hand_over`; bfloat16, tensors, buckets and estimate by the product's own functions on models without",
            f"memory. A bucket holds up to {BUCKET_BYTES // 2**20} MiB; a larger tensor is a bucket of its own. Seconds are",
            "`max(bytes of the root that has most / its card, all bytes / the engine's cards) + buckets of a root * latency`, for any",
            f"number of engines: a broadcast is passed on while it comes in. Each root has one card, an engine's machine {CARDS}; latency",
            f"{LATENCY * 1e6:.0f} us. **Nothing of it is measured.** What engines receive is bit for bit what is written: on gloo, with",
            "2 and 4 ranks and two engines, by the same code (`tests/trainer/test_weight_transfer.py`).",
            "",
            f"| model | tensors | GB | buckets | largest, MiB | ranks | roots | GB of the root with most | {links} |",
            "|---" * (8 + len(LINKS)) + "|",
            *(line for name in MODELS for line in rows(name, KNOWN[name])),
            "",
        ]
    )


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table)
