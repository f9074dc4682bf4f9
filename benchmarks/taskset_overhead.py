"""Cost that the orchestrator adds to a taskset of verifiers: `python -m benchmarks.taskset_overhead [--write]
[--profile FOLDER]`.

In one process, runners alternate on the same taskset, task after task, with the same engine (`instant_engine`, HTTP, a
separate process whose CPU time does not count):

- ours: the orchestrator as in a run, with the environment in a separate process; one step's batch, from the published
weights to the files of the batch and its trace. While the trainer "trains", it is idle, and the others have their turn;
- runner: the smallest possible runner in one process: `Env.run` by our adapter in a loop, and a client that calls the
engine;
- spared: the same, with loaded objects excluded from garbage collection, as in our processes;
- theirs: verifiers' own runner with the cheapest possible agent (`tasksets/agent_in_process.py`).

The CPU time (of the process, and of the environment's) is compared within a round, so that disturbances affect all
equally; the figures are medians of the rounds. The CPU time per second that the orchestrator uses while it waits is
subtracted from the others' turns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import aiohttp
from loguru import logger

from benchmarks.beside_verifiers import GROUP, LOOK_SECONDS, TASKSET, Play, open_verifiers
from benchmarks.costs import Cost, profiler, write_profile
from benchmarks.instant_engine import instant_engine
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.environments.registry import load_environment
from rlrun.environments.stage import InProcessStage
from rlrun.orchestrator.main import Outside, orchestrate_attempt
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.orchestrator.simulation.orch_simulation import (
    API_KEY,
    FakeTrainer,
    begin,
    eventually,
    in_process,
    make_config,
)

ROOT = Path(__file__).resolve().parents[1]
TASKSETS = str(ROOT / "benchmarks" / "tasksets")
"""Search path of the environment's process."""
RESULTS = Path(__file__).parent / "results" / "taskset_overhead.md"
ROLLOUTS = 160
"""Rollouts of a turn, all in flight at once."""
IDLE_SECONDS = 1.0
SPARED = ("ours", "spared")
GOAL = 0.05
API = "/v1/chat/completions"
_TICK = os.sysconf("SC_CLK_TCK")


def cpu(pids: Sequence[int]) -> float:
    """Return CPU seconds of this process, and of other live processes."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    used = own.ru_utime + own.ru_stime
    for pid in pids:
        with suppress(OSError):  # it has ended
            # The name, in parentheses, may contain any characters: the fields follow the last parenthesis.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / _TICK
    return used


def children() -> list[int]:
    """Return this process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


class PlainModel:
    """Model client that only calls the engine, which is the minimal cost of a reply in one process."""

    def __init__(self, connections: aiohttp.ClientSession, url: str) -> None:
        self._connections, self._url = connections, url + API

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        body = {"model": "policy", "messages": list(messages), "max_tokens": max_tokens or 8}
        async with self._connections.post(self._url, json=body) as response:
            choice = (await response.json())["choices"][0]
        return Reply(choice["message"]["content"], choice["finish_reason"])


def open_runner(connections: aiohttp.ClientSession, url: str, gate: asyncio.Semaphore) -> Play:
    """Open verifiers' `Env.run`, limits, hooks and rewards through our adapter, and the engine, without an
    orchestrator."""
    stage, model = InProcessStage(load_environment(f"verifiers:{TASKSET}", {})), PlainModel(connections, url)
    tasks = stage.tasks("train")

    async def play(index: int) -> None:
        async with gate:
            played = await stage.play(tasks[index // GROUP], model, timeout_seconds=600, reward_seconds=600)
            assert played.episode.last_reply

    return play


class Turns(FakeTrainer):
    """Gives the orchestrator a turn, then each of the others, once per step; the first step warms up."""

    others: dict[str, Play]
    profiles: dict[str, cProfile.Profile]
    costs: dict[str, list[Cost]]

    async def _train(self) -> None:
        self.channel.accept_batches(0)
        self.channel.phase("publishing")
        self.costs = {name: [] for name in ["ours", *self.others, "idle"]}
        engine = set(children())  # the environment's process has not started yet
        for step in range(1, self.max_steps + 1):
            await self._turn("ours", partial(self._batch, step), engine)
            for name, play in self.others.items():
                first = (step - 1) * ROLLOUTS
                await self._turn(name, partial(_all, play, range(first, first + ROLLOUTS)), engine)
            await self._turn("idle", partial(asyncio.sleep, IDLE_SECONDS), engine)
            self.channel.append_event("trained", step, metrics={"loss": 0.5, "perf/throughput": 10.0})
            print(f"step {step}", {name: round(costs[-1].cpu_ms, 2) for name, costs in self.costs.items()}, flush=True)
        self._publish(self.max_steps)
        folder = self.paths.checkpoint(self.max_steps, 1)
        (folder / "trainer").mkdir(parents=True)
        self.channel.append_event("checkpoint_saved", self.max_steps, path=folder)
        self.channel.append_event("finished", self.max_steps)

    async def _batch(self, step: int) -> None:
        self._publish(step - 1)
        self.channel.phase("waiting_for_batch")
        await self._next()
        await eventually(self.paths.trace(step).exists)  # written in the background, after the batch
        self.channel.phase("training")

    async def _turn(self, name: str, act: Callable[[], Awaitable[None]], engine: set[int]) -> None:
        profile = self.profiles.get(name)
        # In its own process the orchestrator excludes loaded objects (`rlrun.diagnostics.heap`); the other runners scan
        # all of them.
        gc.unfreeze()
        if name in SPARED:
            gc.freeze()
        pids = [pid for pid in children() if pid not in engine]
        began, used = time.monotonic(), cpu(pids)
        if profile is not None:
            profile.enable()
        await act()
        if profile is not None:
            profile.disable()
        pids = pids or [pid for pid in children() if pid not in engine]
        self.costs[name].append(Cost(ROLLOUTS, time.monotonic() - began, cpu(pids) - used))


async def _all(play: Play, numbers: Sequence[int]) -> None:
    await asyncio.gather(*map(play, numbers))


async def measure(
    url: str, rounds: int, *, own_process: bool, profiles: dict[str, cProfile.Profile]
) -> dict[str, list[Cost]]:
    """Return costs of each runner's rounds, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        root, steps = Path(folder) / "run", rounds + 1
        config = make_config(
            root,
            tokenizer,
            max_steps=steps,
            seq_len=256,
            batch_size=ROLLOUTS,
            max_concurrency=ROLLOUTS,
            environments=[{"id": f"verifiers:{TASKSET}", "group_size": GROUP}],
            # So that it is idle while the others have their turn.
            algorithm={"max_async_level": 0, "max_off_policy_steps": 0},
            checkpoint={"interval": steps},
        )
        paths = RunPaths(root)
        trainer = Turns(paths, begin(paths, 1), steps, steps, look_seconds=LOOK_SECONDS)
        trainer.profiles = profiles
        async with AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0)
            connections = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            gate = asyncio.Semaphore(ROLLOUTS)
            runner = open_runner(connections, url, gate)
            trainer.others = {
                "runner": runner,
                "spared": runner,
                "theirs": await stack.enter_async_context(open_verifiers("agent_in_process", connections, url, gate)),
            }
            await stack.enter_async_context(trainer)
            resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_urls": [url]})
            outside = Outside(open_environments=open_arenas if own_process else in_process)

            def loaded() -> None:
                gc.collect()  # excluded from collection with each of our turns

            assert await orchestrate_attempt(resolved, attempt=1, api_key=API_KEY, outside=outside, loaded=loaded) == 0
        return {name: costs[1:] for name, costs in trainer.costs.items()}


WORDS = {
    "ours": "our orchestrator",
    "runner": "the least runner in one process",
    "spared": "the same, sparing what is loaded as ours does",
    "theirs": "verifiers' runner, an agent in its process",
}


def without_idle(costs: dict[str, list[Cost]]) -> dict[str, list[float]]:
    """Return milliseconds of CPU time of a rollout in each round, without idle cost."""
    idle = statistics.median(cost.cpu_seconds / cost.seconds for cost in costs["idle"])
    return {
        name: [
            1000 * (cost.cpu_seconds - (0.0 if name == "ours" else idle * cost.seconds)) / cost.rollouts
            for cost in costs[name]
        ]
        for name in WORDS
    }


def report(costs: dict[str, list[Cost]], what: str) -> list[str]:
    """Return medians, and ratios within a round."""
    used = without_idle(costs)
    lines = [
        f"| {what} | CPU per rollout, ms | least to most | ours is more by | least to most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, each in used.items():
        more = [100 * (ours / theirs - 1) for ours, theirs in zip(used["ours"], each, strict=True)]
        ratio = f"{statistics.median(more):+.1f} % | {min(more):+.1f} to {max(more):+.1f}" if name != "ours" else " | "
        lines.append(
            f"| {WORDS[name]} | {statistics.median(each):.2f} | {min(each):.2f} to {max(each):.2f} | {ratio} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--in-process", action="store_true", help="no process for the environment, which shows its cost"
    )
    parser.add_argument("--profile", type=Path, help="folder for a profile of each runner; nothing else is measured")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args(argv)
    logger.remove()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TASKSETS, os.environ.get("PYTHONPATH")]))
    profiles = {name: profiler() for name in WORDS} if options.profile is not None else {}
    with instant_engine() as url:
        costs = asyncio.run(measure(url, options.rounds, own_process=not options.in_process, profiles=profiles))
    for name, profile in profiles.items():
        write_profile(profile, options.profile / f"{name}.txt", rollouts=ROLLOUTS * (options.rounds + 1))
    what = "environment in the same process" if options.in_process else "environment in a process of its own"
    lines = report(costs, what)
    print("\n".join(lines))
    if options.write:
        head = [
            "# What the orchestrator adds to a taskset of verifiers",
            "",
            f"`python -m benchmarks.taskset_overhead --rounds {options.rounds} --write`; {os.cpu_count()} cores ({platform.machine()}),",
            f"{options.rounds} rounds of {ROLLOUTS} rollouts of each runner, in turns. Goal: at most {100 * GOAL:.0f} % more.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
