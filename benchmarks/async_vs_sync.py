"""Asynchronous against synchronous training on the same number of samples: `python -m benchmarks.async_vs_sync [--real]`.

Simulated: the real orchestrator and the real channel; an engine that has room for one batch of rollouts at a time, each of which takes a
stated time, and a trainer that sleeps. Synchronous (`maxAsyncLevel: 0`) the two take turns; asynchronous (2) they overlap, so where both
take the same time the ideal ratio of wall times is 2.

Real (`--real`): the quickstart with one trainer rank and one engine, on this machine's cores, with both settings in turn.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "orchestrator" / "simulation"))

from orch_simulation import FakeEngine, make_config, simulate  # noqa: E402

from rlrun.inference.client import Completion  # noqa: E402
from rlrun.trainer.tiny_model import make_tokenizer  # noqa: E402

BATCH = 32
GROUP = 4
LEVELS = (0, 2)


@dataclass
class TimedEngine(FakeEngine):
    """Has room for `slots` rollouts; each holds its place for `seconds`."""

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


async def simulated(level: int, generate_seconds: float, train_seconds: float, steps: int) -> float:
    """Wall time of a simulated run, in seconds, from the first version to the last."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        config = make_config(
            Path(folder) / "run",
            tokenizer,
            max_steps=steps,
            batch_size=BATCH,
            max_concurrency=64 * BATCH,
            environments=[{"id": "reverse-text", "group_size": GROUP}],
            algorithm={"max_async_level": level, "max_off_policy_steps": 8},
            checkpoint={"interval": steps},
        )
        outcome = await simulate(
            config, engines=[TimedEngine(seconds=generate_seconds)], step_seconds=lambda: train_seconds
        )
        assert outcome.code == 0
        return outcome.trainer.published[steps] - outcome.trainer.published[0]


def real(level: int, steps: int) -> float:
    """Wall time of a real run, in seconds, from the end of the first step to the end of the last."""
    document = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    spec = document["spec"]
    spec |= {"maxSteps": steps, "evaluation": None, "checkpoint": {"enabled": False}}
    spec["algorithm"] = {"preset": "grpo", "maxAsyncLevel": level}
    spec["trainer"]["processesPerReplica"] = 1
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.yaml"
        manifest.write_text(yaml.safe_dump(document))
        command = [
            sys.executable,
            "-m",
            "rlrun.cli.main",
            "local",
            str(manifest),
            "--output-dir",
            f"{folder}/run",
            "--plain",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ), cwd=ROOT)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines if line["step"] > 0}
    return float(times[steps] - times[1])


def table(rows: Sequence[tuple[str, float, float, float, str]]) -> str:
    """Rows of (what, synchronous s, asynchronous s, ratio, ideal) as Markdown."""
    head = ["| parts | synchronous, s | asynchronous, s | ratio | ideal |", "|---|---:|---:|---:|---:|"]
    return "\n".join(
        head
        + [f"| {what} | {sync:.2f} | {over:.2f} | {ratio:.2f} | {ideal} |" for what, sync, over, ratio, ideal in rows]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="async_vs_sync", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each simulated run")
    parser.add_argument("--real", action="store_true", help="also with real parts (minutes)")
    parser.add_argument("--real-steps", type=int, default=40, help="steps of each real run")
    options = parser.parse_args(argv)
    logger.remove()
    rows = []
    for generate, train in ((0.25, 0.25), (0.4, 0.1), (0.1, 0.4)):
        sync, over = (asyncio.run(simulated(level, generate, train, options.steps)) for level in LEVELS)
        ideal = (generate + train) / max(generate, train)
        rows.append(
            (f"simulated, generation {generate} s, training {train} s", sync, over, sync / over, f"{ideal:.2f}")
        )
    if options.real:
        began = time.monotonic()
        sync, over = (real(level, options.real_steps) for level in LEVELS)
        rows.append((f"real, 1 rank and 1 engine, {os.cpu_count()} cores", sync, over, sync / over, "–"))
        print(f"real runs took {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
