"""The long tail with a real vLLM engine: the real orchestrator and channel, and a trainer that keeps time. See `async_vs_sync`."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_tail import Pace, least_seconds
from benchmarks.real_engine import Load, RealEngine, long_tailed, measure_pace, real_engine, watched
from tests.support.orchestrator.simulation.orch_simulation import make_config, simulate

BATCH = 32
GROUP = 4
LEVEL = 4
OFF_POLICY = 8
MEAN_TOKENS = 160
MOST_TOKENS = 6 * MEAN_TOKENS
MODEL_TOKENS = 1024
TRAINING = 0.5
"""Training time of a step, relative to a full engine's time for a batch, so that the ratio does not depend on the
machine."""
PACE_BATCHES = 3


@dataclass(frozen=True)
class RealRun:
    """Result of a run."""

    seconds: float
    """Seconds from the first version to the last."""
    batches: Sequence[Sequence[int]]
    """Tokens of each trained rollout, by step."""
    load: Load
    cancelled: float
    """Groups that were cancelled for their age."""
    update_seconds: float
    """Total seconds of all hand-overs."""

    def share(self, pace: Pace, *, train_seconds: float, max_off_policy_steps: int) -> float:
        """Share of the least time for these batches."""
        bound = least_seconds(
            self.batches,
            slots=BATCH,
            train_seconds=train_seconds,
            max_off_policy_steps=max_off_policy_steps,
            pace=pace,
        )
        return bound / self.seconds


async def play(engine: RealEngine, folder: Path, *, level: int, steps: int, train_seconds: float) -> RealRun:
    """Play a run whose trainer sleeps for `train_seconds` in each step: it and the engine compete for no core."""
    client: Any = engine.client(long_tailed(MEAN_TOKENS))
    config = make_config(
        folder,
        engine.model,
        max_steps=steps,
        seq_len=MOST_TOKENS + 64,
        batch_size=BATCH,
        max_concurrency=64 * BATCH,
        environments=[{"id": "reverse-text", "group_size": GROUP}],
        sampling={"max_tokens": MOST_TOKENS},
        algorithm={"max_async_level": level, "max_off_policy_steps": OFF_POLICY if level else 0},
        checkpoint={"interval": steps},
    )
    async with engine.client(long_tailed(1)) as other, watched(other) as load:
        outcome = await simulate(config, engines=[client], step_seconds=lambda: train_seconds)
        assert outcome.code == 0
        seen = load()
    batches: list[list[int]] = []
    for batch in outcome.trainer.batches:
        prompts = {s.group: tuple(s.input_ids[: int(s.loss_mask.argmax())].tolist()) for s in batch.samples}
        batches.append([tokens for prompt in prompts.values() for tokens in client.spent[prompt]])
    lines = [json.loads(line) for line in outcome.paths.metrics.read_text().splitlines()]
    return RealRun(
        outcome.trainer.published[steps] - outcome.trainer.published[0],
        batches,
        seen,
        sum(line.get("groups/cancelled/age", 0.0) for line in lines),
        sum(line.get("time/update_weights", 0.0) for line in lines),
    )


def some_prompts(count: int) -> list[list[int]]:
    """Return prompts like those of a run, without a task."""
    rng = random.Random(count)
    return [[1, *(rng.randrange(20, 90) for _ in range(10))] for _ in range(count)]


COLUMNS = ("s", "share of its bound", "pace, ms", "running", "waiting", "preemptions", "cancelled", "hand-overs, s")


def row(what: str, run: RealRun, share: float, pace: Pace) -> str:
    """Return a row of the table."""
    cells = [
        what,
        f"{run.seconds:.1f}",
        f"{share:.2f}",
        f"{1e3 * pace.step:.1f} + {1e3 * pace.sequence:.2f} n",
        f"{run.load.running:.1f}",
        f"{run.load.waiting:.1f}",
        f"{run.load.preemptions}",
        f"{run.cancelled:.0f}",
        f"{run.update_seconds:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def real_long_tail_table(steps: int, rounds: int) -> str:
    """Return synchronous and asynchronous runs in turn, as Markdown. The engine's pace is measured before and after
    each run."""
    rows = [f"| {' | '.join(['setting', *COLUMNS])} |", "|---" + "|---:" * len(COLUMNS) + "|"]
    ratios = []
    wanted, prompts = long_tailed(MEAN_TOKENS), some_prompts(PACE_BATCHES * BATCH // GROUP)
    with (
        tempfile.TemporaryDirectory() as root,
        real_engine(Path(root), max_num_seqs=BATCH, max_model_len=MODEL_TOKENS) as engine,
    ):

        def measured() -> Pace:
            return asyncio.run(measure_pace(engine, prompts, GROUP, wanted, BATCH))

        measured()  # the first requests include late imports
        before = measured()
        train_seconds = round(TRAINING * MEAN_TOKENS * (before.step + before.sequence * BATCH), 2)
        for number in range(rounds):
            seconds = []
            for what, level in (("synchronous", 0), ("asynchronous", LEVEL)):
                folder = Path(root) / f"run-{number}-{level}"
                run = asyncio.run(play(engine, folder, level=level, steps=steps, train_seconds=train_seconds))
                after = measured()
                pace = Pace((before.step + after.step) / 2, (before.sequence + after.sequence) / 2)
                share = run.share(pace, train_seconds=train_seconds, max_off_policy_steps=OFF_POLICY if level else 0)
                before = after
                seconds.append(run.seconds)
                rows.append(row(what, run, share, pace))
            ratios.append(seconds[0] / seconds[1])
    found = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return "\n".join([*rows, "", f"Ratio: {found}. {steps} steps; training takes {train_seconds} s in each."])
