"""Stalls of the orchestrator's event loop with long answers: `python -m benchmarks.event_loop_lag [--write]`.

The whole orchestrator, 64 engines, 10,000 rollouts in flight, answers of 32,768 tokens. The engines are one process on
64 ports (`instant_engine`), which starts to answer when all rollouts are in flight, and then answers one group per
interval; the environment has a separate process. The trainer takes batches without reading them.

Two figures describe each interval between two polls of the loop for events, from the first answer to the last batch.
Its wall-clock time includes the core time of other processes and the time in which other threads hold the interpreter's
lock. The CPU time of the loop's thread includes neither. The value for an idle machine is between them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import selectors
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from benchmarks.costs import cpu
from benchmarks.instant_engine import instant_engines
from rlrun.diagnostics import heap
from rlrun.orchestrator.main import orchestrate_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.orchestrator.simulation.orch_simulation import API_KEY, FakeTrainer, begin, make_config

RESULTS = Path(__file__).parent / "results" / "event_loop_lag.md"
GOAL_MS = 100.0
GROUP = 8
LARGE: dict[str, Any] = {
    "id": "benchmarks.large_lines:environment",
    "group_size": GROUP,
    "timeout_seconds": 3600,
    "memory_gib": 16,
}
STEPS = 3


class Stretches(selectors.DefaultSelector):
    """Wall-clock and CPU seconds of each interval between two polls for events."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float]] = []
        self._since: tuple[float, float] | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self._since is not None:
            self.found.append((time.perf_counter() - self._since[0], time.thread_time() - self._since[1]))
        ready = super().select(timeout)
        self._since = time.perf_counter(), time.thread_time()
        return ready


class BlindTrainer(FakeTrainer):
    """Trainer that trains at once on batches without reading them, because reads would be work of this process."""

    batches_at: list[float]
    """Arrival time of each batch (monotonic seconds)."""

    async def _train(self) -> None:
        self.channel.accept_batches(0)
        self.channel.phase("publishing")
        self._publish(0)
        for step in range(1, self.max_steps + 1):
            self.channel.phase("waiting_for_batch")
            await self._next()
            self.batches_at.append(time.monotonic())
            self._publish(step)
            self.channel.append_event("trained", step, metrics={"loss": 0.5})
        self.channel.append_event("finished", self.max_steps)


async def played(urls: Sequence[str], selector: Stretches, options: argparse.Namespace) -> dict[str, float]:
    """Run once; return the figures."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tokenizer, root = Path(folder) / "tokenizer", Path(folder) / "run"
        make_tokenizer().save_pretrained(tokenizer)
        ahead = options.flight // options.batch + 1
        config = make_config(
            root,
            tokenizer,
            max_steps=ahead + STEPS,
            seq_len=options.tokens + 64,
            batch_size=options.batch,
            max_concurrency=options.flight,
            sampling={"max_tokens": options.tokens},
            environments=[
                {"id": "reverse-text", "group_size": GROUP, "timeout_seconds": 3600},
                *([] if not options.large_every else [LARGE | {"args": {"every": options.large_every}}]),
            ],
            algorithm={"max_async_level": ahead, "max_off_policy_steps": 2 * ahead},
            checkpoint={"interval": ahead + STEPS},
        )
        paths = RunPaths(root)
        trainer = BlindTrainer(paths, begin(paths, 1), ahead + STEPS, ahead + STEPS)
        trainer.batches_at = []
        async with trainer:
            resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_urls": list(urls)})
            running = asyncio.create_task(
                orchestrate_attempt(resolved, attempt=1, api_key=API_KEY, loaded=heap.Slices().begin)
            )
            used = began = 0.0
            while len(trainer.batches_at) < STEPS:
                if not began and (root / "journal").exists():  # the first answer
                    began, used = time.monotonic(), cpu()
                    selector.found.clear()
                await asyncio.sleep(0.01)
                assert not running.done(), running.result()
            seconds, used, found = time.monotonic() - began, cpu() - used, list(selector.found)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    rollouts = STEPS * options.batch
    walls, cpus = sorted(wall for wall, _ in found), sorted(own for _, own in found)
    return {
        "rollouts": float(rollouts),
        "seconds": seconds,
        "CPU per rollout, ms": 1000 * used / rollouts,
        "worst stretch, ms": 1000 * walls[-1],
        "99.9 % of stretches below, ms": 1000 * walls[int(0.999 * len(walls))],
        "worst CPU of a stretch, ms": 1000 * cpus[-1],
        "stretches above 100 ms of CPU": float(sum(own > GOAL_MS / 1000 for own in cpus)),
        "stretches above 100 ms": float(sum(wall > GOAL_MS / 1000 for wall in walls)),
        "stretches": float(len(walls)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--flight", type=int, default=10_000, help="rollouts in flight")
    parser.add_argument("--tokens", type=int, default=32_768, help="of each answer")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between the answers of two groups")
    parser.add_argument(
        "--large-every", type=int, default=0, help="distance of episodes with a line of 60 MB, in half of the groups"
    )
    parser.add_argument("--stock", action="store_true", help="engines without the packed route")
    parser.add_argument("--folder", help="folder of the run; default: the system's folder for temporary files")
    parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args(argv)
    logger.remove()
    selector = Stretches()
    loop = partial(asyncio.SelectorEventLoop, selector)
    engine = ["--tokens", str(options.tokens), "--gather", str(options.flight), "--every", str(options.every)]
    with (
        instant_engines(options.engines, *engine, *(["--stock"] if options.stock else [])) as urls,
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        figures = runner.run(played(urls, selector, options))
    lines = ["| what | figure |", "|---|---:|", *(f"| {what} | {value:.1f} |" for what, value in figures.items())]
    text = "\n".join(lines)
    print(text)
    if options.write:
        head = [
            "# How long the event loop stands still",
            "",
            f"`python -m benchmarks.event_loop_lag`; {options.engines} engines, {options.flight} rollouts in flight, answers of"
            f" {options.tokens} tokens, a line of 60 MB {f'each {options.large_every} episodes' if options.large_every else 'never'},",
            f"batches of {options.batch}; {os.cpu_count()} cores ({platform.machine()}), load of the machine {os.getloadavg()[1]:.1f}."
            f" Goal: {GOAL_MS:.0f} ms.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, text, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
