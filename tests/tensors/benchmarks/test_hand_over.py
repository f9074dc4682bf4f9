"""Agreement of the version size table with the tensors that the product publishes."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.hand_over import tensors_of
from rlrun.fit.architecture import KNOWN
from rlrun.protocol.messages.buckets import plan_buckets


def test_version_contains_every_parameter_once() -> None:
    for name in ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B"):
        shape = replace(KNOWN[name], layers=2)
        tensors = tensors_of(shape)
        assert sum(tensor.size for tensor in tensors) == 2 * shape.parameters
        assert len(tensors) == 3 + 2 * ((9 + 3 * shape.experts) if shape.experts else 9)
        buckets = plan_buckets(tensors, roots=4)
        assert [slot.tensor.name for bucket in buckets for slot in bucket.slots] == [tensor.name for tensor in tensors]
