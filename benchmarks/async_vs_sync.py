"""Asynchronous against synchronous training on the same number of samples: `python -m benchmarks.async_vs_sync
[--long-tail] [--real]`.

Simulated: the real orchestrator and the real channel, an engine with room for one batch of rollouts at a time, each of
which takes a given time, and a trainer that sleeps. Synchronous (`maxAsyncLevel: 0`), the two take turns; asynchronous
(2), they overlap. If both take the same time, the ideal ratio of wall times is 2.

With a long tail (`--long-tail`): the seconds of each rollout are lognormal and depend on its task and number, so that
both settings process equal samples. Synchronous, each step waits for its longest rollout while the engine becomes idle.
Whole runs are measured, from the first version to the last, including the time in which the pipeline fills and empties,
each against the bound of `least_seconds`.

Real (`--real`): the quickstart with one trainer rank and one engine on this machine's cores, with both settings in
turn.

Both (`--long-tail --real`): the real orchestrator and channel and one real vLLM engine with one place for each rollout
of a batch, which gives each rollout of a task a fixed number of tokens. The trainer sleeps, because it would compete
with the engine for the machine's cores, and the subject is the scheduler. The bound is that of `least_seconds` for the
trained batches, with the pace of vLLM itself: a step costs `a + b * running` seconds, fitted before and after each run
to one single sequence and to many parallel ones. The bound does not include hand-overs, prompts, HTTP and other load of
the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from loguru import logger

from benchmarks.local_command import local_command
from benchmarks.long_tail import least_seconds, lengths
from benchmarks.real_long_tail import real_long_tail_table
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.inference.client.engine_client import Completion
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.orchestrator.simulation.orch_simulation import FakeEngine, make_config, simulate

ROOT = Path(__file__).resolve().parents[1]
BATCH = 32
GROUP = 4
LEVELS = (0, 2)
LONG_TAIL_LEVEL = 4
"""k of the long tail: rollouts in flight and buffered ones together fill the engine's places while the longest run."""
OFF_POLICY = 8
"""M of the long tail: largest age of a group."""


@dataclass
class TimedEngine(FakeEngine):
    """Engine with room for `slots` rollouts; each uses its place for `seconds`."""

    seconds: float = 0.0
    slots: int = BATCH
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.slots)

    async def generate(
        self, token_ids: Sequence[int], *, n: int, max_tokens: int, cache_salt: str | None, **rest: Any
    ) -> list[Completion]:
        async def one() -> None:
            async with self._room:
                await asyncio.sleep(self.seconds)

        await asyncio.gather(*[one() for _ in range(n)])
        return await super().generate(token_ids, n=n, max_tokens=max_tokens, cache_salt=cache_salt, **rest)


@dataclass
class LongTailedEngine(TimedEngine):
    """Engine whose rollouts take lognormal seconds with mean `seconds`, drawn from prompt and number."""

    spent: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    """Seconds of each rollout by prompt."""

    async def generate(
        self, token_ids: Sequence[int], *, n: int, max_tokens: int, cache_salt: str | None, **rest: Any
    ) -> list[Completion]:
        wanted = lengths(token_ids, n, self.seconds)

        async def one(seconds: float) -> None:
            async with self._room:
                await asyncio.sleep(seconds)

        await asyncio.gather(*[one(seconds) for seconds in wanted])
        self.spent[tuple(token_ids)] = wanted
        return await FakeEngine.generate(self, token_ids, n=n, max_tokens=max_tokens, cache_salt=cache_salt, **rest)


@dataclass(frozen=True)
class LongTail:
    """Result of a simulated run with long-tailed lengths."""

    seconds: float
    """Seconds from the first version to the last."""
    bound: float
    """Lower bound of the time of a run that trains these batches."""
    cancelled: float
    """Number of groups that were cancelled for their age."""
    oldest: int
    """Largest number of versions between the dispatch of a trained group and the trained policy."""

    @property
    def share(self) -> float:
        """Share of the bound in the measured time."""
        return self.bound / self.seconds


def simulated_config(folder: Path, level: int, steps: int, off_policy: int) -> OrchestratorConfig:
    """Return the configuration of a simulated run in `folder`, where its tokenizer is written."""
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return make_config(
        folder / "run",
        folder / "tokenizer",
        max_steps=steps,
        batch_size=BATCH,
        max_concurrency=64 * BATCH,
        environments=[{"id": "reverse-text", "group_size": GROUP}],
        algorithm={"max_async_level": level, "max_off_policy_steps": off_policy},
        checkpoint={"interval": steps},
    )


async def long_tailed(level: int, seconds: float, train_seconds: float, steps: int) -> LongTail:
    """Run a simulation whose rollouts take `seconds` on average, a few of them many times that."""
    with tempfile.TemporaryDirectory() as folder:
        config = simulated_config(Path(folder), level, steps, OFF_POLICY if level else 0)
        engine = LongTailedEngine(seconds=seconds)
        outcome = await simulate(config, engines=[engine], step_seconds=lambda: train_seconds)
        assert outcome.code == 0
        batches: list[list[float]] = []
        for batch in outcome.trainer.batches:
            prompts = {s.group: tuple(s.input_ids[: int(s.loss_mask.argmax())].tolist()) for s in batch.samples}
            batches.append([second for prompt in prompts.values() for second in engine.spent[prompt]])
        lines = [json.loads(line) for line in outcome.paths.metrics.read_text().splitlines()]
        return LongTail(
            outcome.trainer.published[steps] - outcome.trainer.published[0],
            least_seconds(
                batches,
                slots=BATCH,
                train_seconds=train_seconds,
                max_off_policy_steps=OFF_POLICY if level else 0,
            ),
            sum(line["groups/cancelled/age"] for line in lines),
            max(batch.step - 1 - s.dispatch_version for batch in outcome.trainer.batches for s in batch.samples),
        )


def long_tail_table(steps: int) -> str:
    """Return synchronous and asynchronous runs on equal rollouts, as Markdown."""
    names = [
        "generation and training",
        "synchronous, s",
        "share of its bound",
        "asynchronous, s",
        "share of its bound",
        "ratio",
    ]
    rows = [f"| {' | '.join([*names, 'cancelled', 'oldest'])} |", "|---" + "|---:" * 7 + "|"]
    for generate, train in ((0.4, 0.4), (0.4, 0.2)):
        sync = asyncio.run(long_tailed(0, generate, train, steps))
        over = asyncio.run(long_tailed(LONG_TAIL_LEVEL, generate, train, steps))
        rows.append(
            f"| {generate} and {train} s per step | {sync.seconds:.2f} | {sync.share:.2f} | {over.seconds:.2f} | {over.share:.2f} "
            f"| {sync.seconds / over.seconds:.2f} | {over.cancelled:.0f} | {over.oldest} |"
        )
    return "\n".join(rows)


async def simulated(level: int, generate_seconds: float, train_seconds: float, steps: int) -> float:
    """Return the wall time of a simulated run, in seconds, from the first version to the last."""
    with tempfile.TemporaryDirectory() as folder:
        config = simulated_config(Path(folder), level, steps, 8)
        outcome = await simulate(
            config, engines=[TimedEngine(seconds=generate_seconds)], step_seconds=lambda: train_seconds
        )
        assert outcome.code == 0
        return outcome.trainer.published[steps] - outcome.trainer.published[0]


def real(level: int, steps: int) -> float:
    """Return the wall time of a real run, in seconds, from the end of the first step to the end of the last."""
    document = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    spec = document["spec"]
    spec |= {"maxSteps": steps, "evaluation": None, "checkpoint": {"enabled": False}}
    spec["algorithm"] = {"preset": "aipo", "maxAsyncLevel": level}
    spec["trainer"]["processesPerReplica"] = 1
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.yaml"
        manifest.write_text(yaml.safe_dump(document))
        command = local_command(manifest, Path(folder, "run"))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ), cwd=ROOT)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines if line["step"] > 0}
    return float(times[steps] - times[1])


def table(rows: Sequence[tuple[str, float, float, float, str]]) -> str:
    """Return rows of (case, synchronous s, asynchronous s, ratio, ideal) as Markdown."""
    head = ["| parts | synchronous, s | asynchronous, s | ratio | ideal |", "|---|---:|---:|---:|---:|"]
    return "\n".join(
        head
        + [f"| {what} | {sync:.2f} | {over:.2f} | {ratio:.2f} | {ideal} |" for what, sync, over, ratio, ideal in rows]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="async_vs_sync", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each simulated run")
    parser.add_argument("--long-tail", action="store_true", help="only the runs with long-tailed lengths")
    parser.add_argument(
        "--real",
        action="store_true",
        help="also with real parts (minutes); with --long-tail: with a real engine instead",
    )
    parser.add_argument("--real-steps", type=int, help="steps of each real run (40; with a long tail 16)")
    parser.add_argument("--rounds", type=int, default=1, help="how often both settings are measured with a real engine")
    options = parser.parse_args(argv)
    logger.remove()
    if options.long_tail and options.real:
        print(real_long_tail_table(options.real_steps or 16, options.rounds))
        return 0
    if options.long_tail:
        print(long_tail_table(options.steps))
        return 0
    rows = []
    for generate, train in ((0.25, 0.25), (0.4, 0.1), (0.1, 0.4)):
        sync, over = (asyncio.run(simulated(level, generate, train, options.steps)) for level in LEVELS)
        ideal = (generate + train) / max(generate, train)
        rows.append(
            (f"simulated, generation {generate} s, training {train} s", sync, over, sync / over, f"{ideal:.2f}")
        )
    if options.real:
        began = time.monotonic()
        sync, over = (real(level, options.real_steps or 40) for level in LEVELS)
        rows.append((f"real, 1 rank and 1 engine, {os.cpu_count()} cores", sync, over, sync / over, "–"))
        print(f"real runs took {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
