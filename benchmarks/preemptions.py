"""Concurrency on an engine with a small KV cache: `python -m benchmarks.preemptions [--rounds N]`.

A real vLLM engine on the CPU has places for many sequences and a KV cache for few of them. The orchestrator's own pool
requests groups of four with long-tailed lengths: with a fixed `maxConcurrency` without the engine's metrics, and with
an unreachable one and control by the metrics. The engine itself counts its sampled tokens, so recomputed ones count
nothing, from the moment at which the run is steady. Other load of the machine affects least the tokens per CPU second
of the engine's processes, which never wait here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from benchmarks.real_engine import RealEngine, long_tailed, real_engine, watched
from rlrun.config.models.rollout import SamplingConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.discovery import Monitor
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.rollouts.engine_session import Session

GROUP = 4
MEAN_TOKENS = 64
PLACES = 64
"""Places of the engine."""
BLOCKS, BLOCK_TOKENS = 64, 32
"""KV cache: room for some 16 sequences, or for five of the longest."""
FIXED = (16, 32, 48, 128)
"""`maxConcurrency`, in rollouts."""
UNBOUND = 256
SETTLE_SECONDS = 8.0
STEERED_SETTLE_SECONDS = 30.0
MEASURE_SECONDS = 12.0


@dataclass(frozen=True)
class Throughput:
    """Measures of an engine over a period."""

    per_second: float
    """Tokens per second."""
    per_cpu_second: float
    running: float
    waiting: float
    preemptions: int
    limit: int
    """Limit of rollouts in flight at the end."""


def generated(text: str) -> float:
    """Return the number of tokens that the engine has sampled since its start, from its metrics."""
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def cpu_seconds(pid: int) -> float:
    """Return CPU seconds of a process and its live descendants."""
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    children = [int(child) for task in folder.glob("task/*/children") for child in task.read_text().split()]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


async def measure(engine: RealEngine, concurrency: int, *, steered: bool, settle: float) -> Throughput:
    """Request as much as the pool allows."""
    client: Any = engine.client(long_tailed(MEAN_TOKENS))
    signal, rng = Signal(), random.Random(concurrency)
    pool = EnginePool([], signal, max_concurrency=concurrency)
    replica = Replica(engine.url, client, version=0, trusted=True, handed=0)
    pool.add(replica)
    sampling = SamplingConfig(temperature=1.0)

    async def ask() -> None:
        while True:
            prompt = [1, *(rng.randrange(20, 90) for _ in range(10))]
            await Session(pool, sampling, []).sample(prompt, max_tokens=1024, n=GROUP)

    async def count() -> tuple[float, float, float]:
        return time.monotonic(), cpu_seconds(engine.pid), generated(await client.metrics_text())

    tasks = [asyncio.create_task(ask()) for _ in range(UNBOUND // GROUP)]
    if steered:
        tasks.append(asyncio.create_task(Monitor(pool, signal).run()))
    try:
        await asyncio.sleep(settle)
        before = await count()
        async with engine.client(long_tailed(1)) as other, watched(other) as load:
            await asyncio.sleep(MEASURE_SECONDS)
            seen = load()
        seconds, cpu, tokens = (after - first for first, after in zip(before, await count(), strict=True))
        limit = min(concurrency, replica.concurrency.limit)
    finally:
        for task in tasks:
            task.cancel()
        failed = [e for e in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(e, Exception)]
        await client.close()
    if failed:
        raise failed[0]
    return Throughput(tokens / seconds, tokens / cpu, seen.running, seen.waiting, seen.preemptions, limit)


def mean(found: Sequence[Throughput]) -> Throughput:
    """Return the mean of the rounds."""
    columns = zip(*[vars(one).values() for one in found], strict=True)
    per_second, per_cpu_second, running, waiting, preemptions, limit = (sum(c) / len(found) for c in columns)
    return Throughput(per_second, per_cpu_second, running, waiting, round(preemptions), round(limit))


def table(fixed: dict[int, Throughput], steered: Throughput) -> str:
    """Return the table as Markdown; the best fixed concurrency is 1."""
    best, best_cpu = (max(getattr(one, name) for one in fixed.values()) for name in ("per_second", "per_cpu_second"))
    names = ["maxConcurrency", "limit", "tokens/s", "of the best", "tokens per CPU s", "of the best"]
    rows = [f"| {' | '.join([*names, 'running', 'waiting', 'preemptions'])} |", "|---" + "|---:" * 8 + "|"]
    for what, one in itertools.chain(((str(c), one) for c, one in fixed.items()), [(f"{UNBOUND}, steered", steered)]):
        rows.append(
            f"| {what} | {one.limit} | {one.per_second:.0f} | {one.per_second / best:.2f} | {one.per_cpu_second:.0f} "
            f"| {one.per_cpu_second / best_cpu:.2f} | {one.running:.1f} | {one.waiting:.1f} | {one.preemptions} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="preemptions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="how often all of it is measured, in turn")
    options = parser.parse_args(argv)
    logger.remove()
    fixed: dict[int, list[Throughput]] = {concurrency: [] for concurrency in FIXED}
    steered: list[Throughput] = []
    small = (f"--num-gpu-blocks-override={BLOCKS}", f"--block-size={BLOCK_TOKENS}")
    with (
        tempfile.TemporaryDirectory() as root,
        real_engine(Path(root), max_num_seqs=PLACES, max_model_len=512, extra_args=small) as engine,
    ):
        asyncio.run(measure(engine, FIXED[0], steered=False, settle=0))  # warms up late imports
        for _ in range(options.rounds):
            for concurrency, found in fixed.items():
                found.append(asyncio.run(measure(engine, concurrency, steered=False, settle=SETTLE_SECONDS)))
            steered.append(asyncio.run(measure(engine, UNBOUND, steered=True, settle=STEERED_SETTLE_SECONDS)))
    print(table({concurrency: mean(found) for concurrency, found in fixed.items()}, mean(steered)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
