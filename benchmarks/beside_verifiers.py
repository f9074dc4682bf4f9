"""The orchestrator against verifiers' own runner, on the same work: `python -m benchmarks.beside_verifiers [--write]`.

The task: a text to reverse, as an environment of our own protocol (`tasksets/turns.py`) and as a taskset of verifiers
0.4. On both sides each rollout sends each of its requests separately, one turn or four; answers have the same letters,
with log-probs; the number of rollouts in flight is the same; and the same engine answers at once, over HTTP, in a
separate process (`instant_engine`). Measured are the CPU time of all other processes, and rollouts per second:

- ours: the whole orchestrator with the environment in a separate process, as in a run, including journal, batches and
traces on disk;
- verifiers' runner with its cheapest own agent (`null`): one program per rollout;
- verifiers' runner with the cheapest possible agent (`tasksets/agent_in_process.py`): a loop in the runner's process,
which saves the program and keeps verifiers' interception server and client;
- for information, ours if a group of a single turn shares its request, as in a run.

All kinds are measured alternately in rounds, each in a separate process, so that a disturbance affects all; the figures
are medians of the rounds. `taskset_overhead` measures the cost that the orchestrator adds to a taskset of verifiers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from loguru import logger

from benchmarks.costs import Cost, cpu
from benchmarks.instant_engine import instant_engine
from rlrun.diagnostics import heap
from rlrun.orchestrator.main import orchestrate_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.support.orchestrator.simulation.orch_simulation import API_KEY, FakeTrainer, begin, make_config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "tasksets"))  # verifiers loads these modules by their short names
RESULTS = Path(__file__).parent / "results" / "beside_verifiers.md"
TASKSET = "vf_reverse"
GROUP = 8
STEPS = 4
"""Batches of a run; the first one warms up and is not measured."""
BATCH, CONCURRENT = 480, 160
TURNS = 4
LOOK_SECONDS = 0.02
"""Time between two polls of the trainer for a batch: each costs a tenth of a rollout."""
GOAL_TIMES = 10.0
Play = Callable[[int], Awaitable[None]]
"""Function that plays the rollout with this number."""


async def orchestrated(url: str, environment: dict[str, Any]) -> Cost:
    """Run the real orchestrator and a trainer that trains at once, from its first batch to its last."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        root = Path(folder) / "run"
        config = make_config(
            root,
            tokenizer,
            max_steps=STEPS,
            seq_len=256,
            batch_size=BATCH,
            max_concurrency=CONCURRENT,
            environments=[{"group_size": GROUP} | environment],
            # So that no work of a next step runs at the start and the end of the measurement.
            algorithm={"max_async_level": 0, "max_off_policy_steps": 0},
            checkpoint={"interval": STEPS},
        )
        paths, used = RunPaths(root), list[float]()

        def takes_batch() -> float:
            used.append(cpu())
            return 0.0

        trainer = FakeTrainer(paths, begin(paths, 1), STEPS, STEPS, takes_batch, look_seconds=LOOK_SECONDS)
        async with trainer:
            resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_urls": [url]})
            assert await orchestrate_attempt(resolved, attempt=1, api_key=API_KEY, loaded=heap.freeze_loaded) == 0
        # A child's CPU time is known after its end, so the measured steps get their share of the total.
        children = (cpu() - time.process_time()) * (STEPS - 1) / STEPS
        seconds = trainer.published[STEPS] - trainer.published[1]  # it publishes as soon as it has a batch
        return Cost((STEPS - 1) * BATCH, seconds, used[STEPS - 1] - used[0] + children)


@asynccontextmanager
async def open_verifiers(
    agent: str, connections: aiohttp.ClientSession, url: str, gate: asyncio.Semaphore
) -> AsyncIterator[Play]:
    """Open verifiers' own runner and client."""
    import verifiers.v1 as vf
    from agent_in_process import AgentInProcess
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    seat = {"harness": {"id": agent}, "runtime": {"type": "subprocess"}}
    config = env_config_type(TASKSET, "").model_validate({"taskset": {"id": TASKSET}, "agent": seat})
    env: vf.Env[Any] = load_environment(config)
    context = ModelContext("policy", EvalClientConfig(base_url=f"{url}/v1", api_key_var="PATH"))
    tasks = [*env.taskset]
    AgentInProcess.connections = connections

    async def play(index: int) -> None:
        episode = await env.run_slot(env.slots(tasks[index // GROUP])[0], context, gate)
        errors = [*episode.errors, *[error for trace in episode.traces for error in trace.errors]]
        assert episode.ok, errors

    async with env.serving():
        yield play


async def by_verifiers(agent: str, url: str, rollouts: int, concurrent: int, turns: int = 1) -> Cost:
    """Play all rollouts with `open_verifiers`, after a few that prepare the shared state."""
    from agent_in_process import AgentInProcess

    AgentInProcess.turns = turns
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as connections,
        open_verifiers(agent, connections, url, asyncio.Semaphore(concurrent)) as play,
    ):
        await asyncio.gather(*map(play, range(concurrent)))
        began, used = time.monotonic(), cpu()
        await asyncio.gather(*map(play, range(rollouts)))
        return Cost(rollouts, time.monotonic() - began, cpu() - used)


@dataclass(frozen=True)
class Kind:
    """One line of the table."""

    what: str
    concurrent: int
    measure: Callable[[str], Coroutine[Any, Any, Cost]]
    """Function from the engine's URL to a cost."""


def _turns(count: int) -> dict[str, Any]:
    return {"id": "turns:turns", "args": {"count": count}}


KINDS = {
    "ours": Kind("our orchestrator", CONCURRENT, lambda url: orchestrated(url, _turns(1))),
    "theirs": Kind(
        "verifiers' runner, an agent in its process",
        CONCURRENT,
        lambda url: by_verifiers("agent_in_process", url, BATCH, CONCURRENT),
    ),
    "ours_turns": Kind(f"our orchestrator, {TURNS} turns", CONCURRENT, lambda url: orchestrated(url, _turns(TURNS))),
    "theirs_turns": Kind(
        f"verifiers' runner, an agent in its process, {TURNS} turns",
        CONCURRENT,
        lambda url: by_verifiers("agent_in_process", url, BATCH, CONCURRENT, TURNS),
    ),
    "program": Kind(
        "verifiers' runner, its cheapest agent (a program)", 4, lambda url: by_verifiers("null", url, 8, 4)
    ),
    "shared": Kind(
        "our orchestrator, one request per group", CONCURRENT, lambda url: orchestrated(url, {"id": "reverse-text"})
    ),
}


def in_own_process(name: str, url: str) -> Cost:
    """Measure one round of a kind in a separate process."""
    command = [sys.executable, "-m", "benchmarks.beside_verifiers", "--measure", name, "--engine", url]
    found = os.environ | {
        "PYTHONPATH": str(ROOT / "benchmarks" / "tasksets")
    }  # search path of the environment's process
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, env=found)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def report(rounds: dict[str, list[Cost]]) -> str:
    """Return medians and their ratios as Markdown."""
    rate = {name: statistics.median(cost.per_second for cost in costs) for name, costs in rounds.items()}
    used = {name: statistics.median(cost.cpu_ms for cost in costs) for name, costs in rounds.items()}
    lines = [
        "| what | in flight | rollouts/s | CPU per rollout, ms | least to most |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, costs in rounds.items():
        kind, each = KINDS[name], [cost.cpu_ms for cost in costs]
        lines.append(
            f"| {kind.what} | {kind.concurrent} | {rate[name]:.1f} | {used[name]:.2f} | {min(each):.2f} to {max(each):.2f} |"
        )

    def times(ours: str, theirs: str) -> str:
        return f"{rate[ours] / rate[theirs]:.1f} times the rollouts per second, {used[theirs] / used[ours]:.1f} times less CPU"

    lines += [
        "",
        f"Against the agent in verifiers' process (goal {GOAL_TIMES:.0f} times): {times('ours', 'theirs')} with one turn,"
        f" {times('ours_turns', 'theirs_turns')} with {TURNS}.",
        f"Against verifiers' cheapest own agent: {times('ours', 'program')}.",
    ]
    return "\n".join(lines)


def write(text: str, rounds: int) -> None:
    """Write the report."""
    head = [
        "# Side by side with verifiers' own runner",
        "",
        f"`python -m benchmarks.beside_verifiers --rounds {rounds} --write`; {os.cpu_count()} cores ({platform.machine()}), medians",
        f"of {rounds} rounds that take turns, each in a process of its own; load of the machine meanwhile: {os.getloadavg()[1]:.1f}.",
        "The engine answers at once, over HTTP, in another process whose CPU is not counted. Each rollout sends its own requests but in",
        "the last line; log-probs on both sides. See the benchmark's own words for what each line is.",
        "",
    ]
    RESULTS.write_text("\n".join([*head, text, ""]))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logger.remove()
    if options.measure:
        print(msgspec.json.encode(asyncio.run(KINDS[options.measure].measure(options.engine))).decode())
        return 0
    with instant_engine() as url:
        rounds: dict[str, list[Cost]] = {name: [] for name in KINDS}
        for number in range(options.rounds):
            for name, costs in rounds.items():
                if name != "program" or number < 2:  # a minute each, and not necessary for two figures
                    costs.append(in_own_process(name, url))
    text_ = report(rounds)
    print(text_)
    if options.write:
        write(text_, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
