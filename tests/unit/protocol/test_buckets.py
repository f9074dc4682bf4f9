"""Transfer buckets of a version, and transfer times of a large version."""

from __future__ import annotations

import pytest
from safetensors.numpy import load

from rlrun.protocol.messages.buckets import (
    BUCKET_BYTES,
    MAX_ROOTS,
    TensorInfo,
    estimate_hand_over,
    plan_buckets,
    root_ranks,
    version_checksum,
)

GB = 1e9


def info(name: str, *shape: int, dtype: str = "bfloat16") -> TensorInfo:
    return TensorInfo(name=name, dtype=dtype, shape=list(shape))


def mixture_of_30_billion() -> list[TensorInfo]:
    """Return the tensors of Qwen3-30B-A3B as in its files."""
    hidden, layers, experts, width, heads, kv_heads, head = 2048, 48, 128, 768, 32, 4, 128
    found = [info("model.embed_tokens.weight", 151_936, hidden)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found += [
            info(f"{at}.self_attn.q_proj.weight", heads * head, hidden),
            info(f"{at}.self_attn.k_proj.weight", kv_heads * head, hidden),
            info(f"{at}.self_attn.v_proj.weight", kv_heads * head, hidden),
            info(f"{at}.self_attn.o_proj.weight", hidden, heads * head),
            info(f"{at}.self_attn.q_norm.weight", head),
            info(f"{at}.self_attn.k_norm.weight", head),
            info(f"{at}.mlp.gate.weight", experts, hidden),
        ]
        for expert in range(experts):
            found += [
                info(f"{at}.mlp.experts.{expert}.gate_proj.weight", width, hidden),
                info(f"{at}.mlp.experts.{expert}.up_proj.weight", width, hidden),
                info(f"{at}.mlp.experts.{expert}.down_proj.weight", hidden, width),
            ]
        found += [info(f"{at}.input_layernorm.weight", hidden), info(f"{at}.post_attention_layernorm.weight", hidden)]
    return [*found, info("model.norm.weight", hidden), info("lm_head.weight", 151_936, hidden)]


def test_buckets_hold_all_in_order_up_to_their_bound() -> None:
    tensors = [info("a", 4), info("b", 4), info("large", 30), info("c", 2), info("n", 3, dtype="int64"), info("d", 1)]
    buckets = plan_buckets(tensors, bucket_bytes=16, roots=2)
    names = [[slot.tensor.name for slot in bucket.slots] for bucket in buckets]
    assert names == [["a", "b"], ["large"], ["c"], ["n"], ["d"]], "of one number format each"
    assert [bucket.size for bucket in buckets] == [16, 60, 4, 24, 2]
    assert [bucket.root for bucket in buckets] == [0, 1, 0, 0, 0], "to the root that has least"
    assert [(slot.offset, slot.end) for slot in buckets[0].slots] == [(0, 8), (8, 16)]


def test_bucket_is_body_of_a_safetensors_file() -> None:
    (bucket,) = plan_buckets([info("a", 2, 1, dtype="int32"), info("b", dtype="int32")])
    header = bucket.header()
    assert len(header) % 8 == 0
    read = load(header + b"".join(number.to_bytes(4, "little") for number in (5, 6, 7)))
    assert {name: values.tolist() for name, values in read.items()} == {"a": [[5], [6]], "b": 7}


def test_unsupported_number_format_is_refused_with_name() -> None:
    with pytest.raises(ValueError, match="w is of type complex64"):
        plan_buckets([info("w", 1, dtype="complex64")])


def test_roots_are_spread_over_the_ranks() -> None:
    assert root_ranks(1) == [0]
    assert root_ranks(3) == [0, 1, 2]
    assert root_ranks(512) == [64 * number for number in range(MAX_ROOTS)]


def test_version_checksum_depends_on_bucket_order() -> None:
    assert version_checksum([1, 2]) != version_checksum([2, 1])


def test_transfer_time_of_30_billion_parameters() -> None:
    """61 GB take 1.2 s over one link of 50 GB/s, and an eighth of that over eight links on both sides."""
    tensors = mixture_of_30_billion()
    assert len(tensors) == 18_867
    assert sum(tensor.size for tensor in tensors) == 61_064_245_248
    for roots in (1, 8):
        buckets = plan_buckets(tensors, roots=roots)
        found = estimate_hand_over(
            buckets,
            send_bytes_per_second=50 * GB,
            receive_bytes_per_second=50 * GB * roots,
            seconds_per_bucket=1e-4,
        )
        assert (found.total, found.buckets) == (61_064_245_248, 226)
        assert found.largest == 151_936 * 2048 * 2, "the embedding, which is a bucket of its own"
        assert sum(bucket.size > BUCKET_BYTES for bucket in buckets) == 2
        assert found.total / roots <= found.kept <= found.total / roots + found.largest
        assert found.seconds == pytest.approx(1.244 / roots, rel=0.07)
    bound = estimate_hand_over(buckets, send_bytes_per_second=50 * GB, receive_bytes_per_second=25 * GB)
    assert bound.seconds == pytest.approx(2.44, rel=0.01), "an engine that takes less is the bound"
    ethernet = estimate_hand_over(buckets, send_bytes_per_second=1.25 * GB, receive_bytes_per_second=1.25 * GB)
    assert ethernet.seconds == pytest.approx(48.9, rel=0.01)
