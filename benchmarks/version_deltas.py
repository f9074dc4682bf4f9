"""Versions as differences from the previous one: bytes and seconds, over training steps of a small model in bfloat16.

    python -m benchmarks.version_deltas [--steps 24] [--write]

The model and its steps are those of `benchmarks.changed_elements`; comparison, codings and rebuilding are the product's
(`weights.differences.compare_buckets`, `protocol.messages.sparse`). Every rebuilt version is compared with the
original. Seconds are those of one bucket of 256 MiB, in which the measured share of elements changes, in one thread.
The last table multiplies by the bytes of Qwen3-30B-A3B. `--write` writes the tables to
benchmarks/results/version_deltas.md.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.changed_elements import ROWS, SETTLED, TOKENS, other_tokens, small_bench
from benchmarks.results_page import run_page
from rlrun.protocol.messages.buckets import BUCKET_BYTES, plan_buckets
from rlrun.protocol.messages.packed_columns import Bytes, apply_difference, encode_difference
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.delta_writer import WHOLE_EVERY, compare_buckets

RESULTS = Path(__file__).parent / "results" / "version_deltas.md"
RATES = (1e-7, 1e-6, 1e-5)
GB = 1e9
LARGE = ("Qwen3-30B-A3B", 61.06)
"""A model and the GB of one of its versions, from benchmarks/results/hand_over.md."""
LINKS = {"1 Gbit/s": 0.125, "10 Gbit/s": 1.25, "25 GB/s": 25.0}
"""Links in GB per second."""
ROOTS, THREADS = 8, 4
"""Ranks that compare at the same time, and threads of each; an engine has one machine with the same number of threads."""


@dataclass(frozen=True)
class Found:
    """Means of a rate's settled steps."""

    share: float
    """Share of the elements that changed."""
    sent: float
    """Bytes of the differences over those of the version."""
    first: float
    """The same for the first step."""


@dataclass(frozen=True)
class Speed:
    """GB of a version per second of one thread."""

    compared: float
    applied: float
    """Speed of applying, which includes the copy of the previous bucket."""
    checked: float
    """Speed of CRC-32."""


def measure(rate: float, steps: int) -> Found:
    """Train, and measure each version as differences from the previous one."""
    shares, sent = [], []
    with small_bench(rate) as bench:
        module, update = bench.learner.model, bench.update(TOKENS, ROWS)
        buckets = plan_buckets(bucket_layout(module, "bfloat16"), bucket_bytes=2**20)

        def version() -> dict[int, torch.Tensor]:
            return gather_buckets(module, buckets, dtype="bfloat16", root=0, pinned=False)

        before = version()
        for step in range(steps):
            bench.learner.step([other_tokens(update, step)], lr=rate)
            now = version()
            part = compare_buckets(now, before)
            for index, body in before.items():
                rebuilt = body.numpy().copy()
                content = part.travels[index]
                if len(content) == len(rebuilt):
                    rebuilt[:] = content
                else:
                    apply_difference(content, rebuilt)
                assert np.array_equal(rebuilt, now[index].numpy())
            size = sum(body.numel() for body in now.values())
            sent.append(sum(part.sizes.values()) / size)
            shares.append(
                sum(int((now[i].view(torch.int16) != before[i].view(torch.int16)).sum()) for i in now) / (size / 2)
            )
            before = now
    return Found(statistics.mean(shares[SETTLED:]), statistics.mean(sent[SETTLED:]), sent[0])


def speed(share: float) -> Speed:
    """Measure one bucket, with a share of its elements changed at random."""
    rng = np.random.default_rng(0)
    base: Bytes = rng.integers(0, 256, BUCKET_BYTES, np.uint8)
    new = base.copy()
    words = new.view(np.uint16)
    words[rng.random(len(words)) < share] ^= 1
    delta = encode_difference(base, new, most=BUCKET_BYTES // 2)
    assert delta is not None

    def rebuild() -> None:
        body = base.copy()
        apply_difference(delta, body)

    encode_seconds = best(lambda: encode_difference(base, new, most=BUCKET_BYTES // 2))
    size = BUCKET_BYTES / GB
    return Speed(size / encode_seconds, size / best(rebuild), size / best(lambda: zlib.crc32(new.data)))


def best(act: Callable[[], object]) -> float:
    """Return the shortest time of three tries, in seconds."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return min(found)


def table(steps: int) -> str:
    """Return all tables as Markdown."""
    found = {rate: measure(rate, steps) for rate in RATES}
    speeds = {rate: speed(one.share) for rate, one in found.items()}
    name, size = LARGE
    links = " | ".join(f"s at {link}, whole / differs" for link in LINKS)
    lines = [
        "# A version as what differs from the one before",
        "",
        f"`python -m benchmarks.version_deltas --steps {steps}`; two Qwen3 layers, weights of spread 0.02, AdamW, {ROWS} other random",
        f"sequences of {TOKENS} tokens in each step, one rank on a CPU. Settled: mean of the steps after the {SETTLED}th. Every version is",
        "rebuilt bit for bit.",
        "",
        "| learning rate | elements that change, settled | bytes by whole, settled | bytes, first step | bytes for each changed element |",
        "|---|---|---|---|---|",
        *(
            f"| {rate:.0e} | {one.share:.2%} | {one.sent:.2%} | {one.first:.2%} | {2 * one.sent / one.share:.2f} |"
            for rate, one in found.items()
        ),
        "",
        f"One thread on one bucket of {BUCKET_BYTES // 2**20} MiB with that share of its elements changed, best of three,",
        "GB of the version per second:",
        "",
        "| learning rate | comparing | rebuilding, with a copy | CRC-32 |",
        "|---|---|---|---|",
        *(
            f"| {rate:.0e} | {one.compared:.1f} | {one.applied:.1f} | {one.checked:.1f} |"
            for rate, one in speeds.items()
        ),
        "",
        f"**By arithmetic** for {name}, {size} GB in bfloat16: {ROOTS} ranks compare with {THREADS} threads each, an engine",
        f"rebuilds and checks with {THREADS}, all at the speeds above. Seconds at a link are those of the bytes alone. A whole version",
        f"comes to the volume at least every {WHOLE_EVERY} versions, so an engine that starts late reads {size} GB and on average",
        f"{WHOLE_EVERY // 2} differences.",
        "",
        f"| learning rate | GB of what differs | s to compare | s to rebuild and check | {links} |",
        "|---" * (4 + len(LINKS)) + "|",
    ]
    for rate, one in found.items():
        sent, at = one.sent * size, speeds[rate]
        rebuilt = size / THREADS * (1 / at.applied + 1 / at.checked)
        times = " | ".join(f"{size / link:.1f} / {sent / link:.2f}" for link in LINKS.values())
        lines.append(
            f"| {rate:.0e} | {sent:.2f} | {size / ROOTS / THREADS / at.compared:.1f} | {rebuilt:.1f} | {times} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table, steps=24)
