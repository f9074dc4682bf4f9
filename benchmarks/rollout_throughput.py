"""CPU cost of a rollout without the model: `python -m benchmarks.rollout_throughput [--profile FILE]`.

The whole orchestrator (dispatcher, sessions, conversations, batches on disk) against a trainer that trains at once and
an engine that answers one request after the other once 2,000 rollouts are in flight, or after a second. Environments
run in this process (`in process`), or in a separate one as in a real run (`own process`). CPU time is that of the
orchestrator and its children, from the first request on. The worst lag is the largest delay of a task that sleeps 5 ms
in a loop.

See `beside_verifiers` and `taskset_overhead` for the same task as a taskset of verifiers 0.4, by verifiers' own runner
and in ours.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from benchmarks.costs import Cost, cpu, profiler, write_profile
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.orchestrator.simulation.orch_simulation import FakeEngine, in_process, make_config, simulate

CONCURRENT = 2000
GROUP = 8
PATIENCE_SECONDS = 1.0


class Lag:
    """Worst lag of the event loop inside of the block, in milliseconds."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.worst = max(self.worst, 1000 * (time.monotonic() - began - 0.005))


@dataclass
class InstantEngine(FakeEngine):
    """Engine that always answers the same four letters, and all at once: when the limit is in flight, or no request has
    come for a while."""

    places: int = CONCURRENT
    lag: Lag = field(default_factory=lambda: Lag())
    most: int = 0
    """Largest number of continuations requested at the same time."""
    began: float = 0.0
    """CPU time at the first request."""
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    _answering: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Completion]:
        if not self.most:
            self.began, self.lag.worst = cpu(), 0.0
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((n, answer))
        now = sum(count for count, _ in self._waiting)
        self.most = max(self.most, now)
        if now >= self.places:
            self._answer_all()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await answer
        except TimeoutError:
            self._waiting = [one for one in self._waiting if one[1] is not answer]
        tokens = [*self.letters[:4], self.eos]
        version = self.version or 0
        return [Completion(tokens, [-0.5] * 5, [version] * 5, "stop") for _ in range(n)]

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._answering = asyncio.create_task(self._answer(waiting))

    async def _answer(self, waiting: Sequence[tuple[int, asyncio.Future[None]]]) -> None:
        """Answer one after the other, as answers come from sockets."""
        for _, answer in waiting:
            if not answer.done():
                answer.set_result(None)
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Measured:
    """A line of the table."""

    what: str
    cost: Cost
    lag_ms: float
    """Worst lag of the event loop."""
    concurrent: int
    """Most rollouts in flight."""


async def ours(
    what: str,
    environment: str,
    steps: int,
    *,
    own_process: bool,
    profile: cProfile.Profile | None = None,
    concurrent: int = CONCURRENT,
) -> Measured:
    """Run a simulation of `steps` batches of `concurrent` rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        config = make_config(
            Path(folder) / "run",
            tokenizer,
            max_steps=steps,
            seq_len=256,
            batch_size=concurrent,
            max_concurrency=concurrent,
            environments=[{"id": environment, "group_size": GROUP}],
            algorithm={"max_async_level": 1, "max_off_policy_steps": 8},
            checkpoint={"interval": steps},
        )
        engine = InstantEngine(places=concurrent)
        if profile is not None:
            profile.enable()
        async with engine.lag as lag:
            outcome = await simulate(
                config, engines=[engine], open_environments=open_arenas if own_process else in_process
            )
        if profile is not None:
            profile.disable()
        assert outcome.code == 0
        seconds = outcome.trainer.published[steps] - outcome.trainer.published[0]
        return Measured(what, Cost(steps * concurrent, seconds, cpu() - engine.began), lag.worst, engine.most)


def table(measured: Sequence[Measured]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| what | rollouts | in flight | rollouts/s | CPU per rollout, ms | worst lag, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {m.what} | {m.cost.rollouts} | {m.concurrent} | {m.cost.per_second:.0f} | {m.cost.cpu_ms:.2f} | {m.lag_ms:.0f} |"
        for m in measured
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="rollout_throughput", description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="batches of 2,000 rollouts")
    parser.add_argument("--profile", type=Path, help="write the 25 most expensive functions of the run in process here")
    options = parser.parse_args(argv)
    logger.remove()
    measured = [
        asyncio.run(ours("our protocol, in process", "reverse-text", options.steps, own_process=False)),
        asyncio.run(ours("our protocol, own process", "reverse-text", options.steps, own_process=True)),
    ]
    if options.profile is not None:
        profile = profiler()
        asyncio.run(ours("", "reverse-text", options.steps, own_process=False, profile=profile))
        write_profile(profile, options.profile, rollouts=options.steps * CONCURRENT)
    print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
