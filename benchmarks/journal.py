"""Cost and benefit of the journal: `python -m benchmarks.journal [--kills 20] [--write]`.

The first table writes many finished rollouts at once, as the orchestrator does, and has the CPU time of each, the
flushes that they share, and the stalls of the event loop. With `--kills`, the orchestrator of a run of stub processes
is killed that often (SIGKILL), each time after a random interval, in a synchronous and in an asynchronous run; then the
same runs are repeated without kills. `--write` writes the tables to benchmarks/results/journal.md.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from rlrun.orchestrator.journal.frames import RolloutEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import Journal, SegmentWriter
from rlrun.orchestrator.types import Recorded, Rollout
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from tests.e2e.local.killed_run import SYNCHRONOUS, KilledRun, make_changes
from tests.processes.stub.harness.stub_run import stub_run

RESULTS = Path(__file__).parent / "results" / "journal.md"
CONCURRENCY = 2000
ASYNCHRONOUS = {"max_async_level": 2, "max_off_policy_steps": 8}
RUNS = {"synchronous": SYNCHRONOUS, "asynchronous": ASYNCHRONOUS}
STEPS = {"synchronous": 60, "asynchronous": 140}
"""Steps that are enough for the kills: an asynchronous run advances further before each."""
LONGEST_LIFE_SECONDS = 1.5


def finished(number: int, tokens: int) -> RolloutEntry:
    """Return a rollout of one turn with a text of about four characters per token."""
    mask = np.arange(tokens) >= tokens // 8
    column = np.linspace(-2, 0, tokens, dtype=np.float32) * mask
    sequence = Recorded(np.arange(tokens, dtype=np.int32), mask, column, np.where(mask, 3, -1).astype(np.int32))
    text = "word" * tokens
    rollout = Rollout((sequence,), 1.0, {"score": 1.0}, ({"role": "user", "content": "ask"},), (text,), task_id="t")
    return RolloutEntry(number, 0, "e", number, 3, 1.0, rollout)


async def _write_all(folder: Path, count: int, tokens: int) -> tuple[float, float, int, float]:
    journal = Journal(SegmentWriter(RunPaths(folder), attempt=1, fingerprint="f"), Volume(folder))
    entries, slots, lags = [finished(n, tokens) for n in range(count)], asyncio.Semaphore(CONCURRENCY), [0.0]

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            lags.append(time.monotonic() - before - 0.001)

    async def add(entry: RolloutEntry) -> None:
        async with slots:
            await journal.add(entry)

    watching = asyncio.create_task(watch())
    wall, processor = time.monotonic(), time.process_time()
    await asyncio.gather(*map(add, entries))
    wall, processor = time.monotonic() - wall, time.process_time() - processor
    watching.cancel()
    await journal.close()
    return wall, processor, journal.flushes, max(lags)


def cost() -> list[str]:
    """Return the first table."""
    lines = [
        "| tokens | rollouts | MB | rollouts/s | CPU per rollout (ms) | flushes | worst lag (ms) | read again (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens, count in ((256, 8000), (4096, 4000), (32768, 500)):
        with TemporaryDirectory() as name:
            wall, processor, flushes, lag = asyncio.run(_write_all(Path(name), count, tokens))
            segments = RunPaths(Path(name)).journal_on_disk()
            size = sum(segment.path.stat().st_size for segment in segments) / 1e6
            began = time.monotonic()
            read = sum(len(read_segment(segment.path).entries) for segment in segments)
            took = time.monotonic() - began
            assert read == count
        lines.append(
            f"| {tokens} | {count} | {size:.0f} | {count / wall:.0f} | {processor / count * 1e3:.2f} | {flushes} | "
            f"{lag * 1e3:.0f} | {took:.2f} |"
        )
    return lines


def _has_more_requests(killed: KilledRun, asked: int) -> bool:
    return len(killed.requests()) > asked


def _killed(folder: Path, steps: int, algorithm: dict[str, int], kills: int, rng: random.Random) -> KilledRun:
    with stub_run(folder, **make_changes(steps, algorithm)) as run:
        killed = KilledRun(run)
        killed.begin()
        for _ in range(kills):
            killed.start()
            killed.until(partial(_has_more_requests, killed, len(killed.requests())), "it requests rollouts")
            time.sleep(rng.uniform(0, LONGEST_LIFE_SECONDS))
            if killed.orchestrator.poll() is not None:
                break  # it completed before the kills
            killed.kill()
            print(f"killed {len(killed.kills)} times, step {killed.kills[-1].attempt.base_step}", flush=True)
        if len(killed.kills) == kills:
            killed.start()
        killed.finish()
        return killed


def saved(kills: int, labels: Sequence[str]) -> list[str]:
    """Return the second table, of the runs with these labels."""
    lines = [
        "Again: rollouts that were finished and of use before a kill, and were asked for again. Twice: groups that were trained in two",
        "steps. Missing: groups that were trained in none although the undisturbed run trained them, or with another task; in brackets",
        "those near the end, of which any may be left over. Too old: samples beyond `maxOffPolicySteps`. Shift: the most steps that a",
        "group was trained earlier or later than in the undisturbed run; in brackets that of a second undisturbed run. Sampler: its",
        "state in the last checkpoint.",
        "",
        "| run | kills | trained groups | rollouts asked of the engine | again | twice | missing | too old | shift | sampler |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label in labels:
        algorithm = RUNS[label]
        steps, limit = STEPS[label], algorithm["max_off_policy_steps"]
        with TemporaryDirectory() as name:
            killed = _killed(Path(name) / "killed", steps, algorithm, kills, random.Random(kills))
            whole = _killed(Path(name) / "whole", steps, algorithm, 0, random.Random(0))
            second = _killed(Path(name) / "second", steps, algorithm, 0, random.Random(0))
            again = killed.generated_again(limit)
            trained, expected = killed.trained(), whole.trained()
            counts = Counter(group for groups in trained.values() for group in groups)
            reference = {group: task for groups in expected.values() for group, task in groups.items()}
            found = {group: task for groups in trained.values() for group, task in groups.items()}
            asked = sum(request["n"] for request in killed.requests())
            wanted = sum(request["n"] for request in whole.requests())
            # At the end of an asynchronous run, groups beyond the trained ones are in flight; which of them remain is
            # random.
            last = max(reference)
            missing = [group for group, task in reference.items() if found.get(group) != task]
            tail = sum(group > last - steps // 10 for group in missing)
            state = "equal" if killed.sampler() == whole.sampler() else "differs"
            lines.append(
                f"| {label} | {len(killed.kills)} | {len(found)} | {asked} (undisturbed: {wanted}) | {len(again)} | "
                f"{sum(count > 1 for count in counts.values())} | {len(missing)} ({tail}) | {killed.too_old(limit)} | "
                f"{killed.shift(whole)} ({second.shift(whole)}) | {state} |"
            )
            print(*again, lines[-1], sep="\n", flush=True)
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="of the orchestrator in each run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="that are killed")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "# The journal of finished rollouts: its cost, and what kills cost with it",
        "",
        f"`python -m benchmarks.journal --kills N`; {platform.machine()}. {CONCURRENCY} rollouts wait at once; a flush is an `fdatasync`.",
        "",
        *cost(),
    ]
    if options.kills:
        lines += [
            "",
            f"{STEPS} steps of 4 groups of 4, a checkpoint every 2 steps.",
            "",
            *saved(options.kills, options.runs),
        ]
    print("\n".join(lines))
    if options.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
