"""Fixed and elastic engines under a changing load: `python -m benchmarks.elastic_engines [--write]`.

The real orchestrator, a trainer that only keeps time, and engines in separate processes, each of which answers one
group after the other. The duration of an answer depends only on the step, so that the load is the same for all: answers
become four times as long, and short again. The operator's own function decides on the orchestrator's reports. An engine
is started, or ended once it is drained, as by a Deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from loguru import logger

from benchmarks.instant_engine import InstantEngine
from rlrun.local.preflight import free_port
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.main import Outside, orchestrate_attempt
from rlrun.protocol.files.metrics_line import read_metrics
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages import endpoints
from rlrun.protocol.messages.lease_annotations import EngineLoad
from rlrun_operator.decide.engine_count import Rules, choose_engines
from tests.support.orchestrator.simulation.orch_simulation import API_KEY, FakeTrainer, begin, in_process, make_config

RESULTS = Path(__file__).parent / "results" / "elastic_engines.md"
QUIET, BUSY, AFTER = 20, 45, 35
"""Steps with short answers, with long ones, and with short ones again."""
STEP_SECONDS = 1.0
GROUPS, MEMBERS = 8, 2
ANSWER_SECONDS = 0.1
LONGER = 4
"""Factor on an answer's time in the busy steps."""
RULES = Rules(least=1, most=6, target_wait=0.05, stabilization_seconds=5.0)
LOOK_SECONDS = 0.5


class LoadedEngine(InstantEngine):
    """Engine that answers one request after the other, in a time that depends on its version."""

    def __init__(self) -> None:
        super().__init__(gather=1)

    async def _pace(self) -> None:
        while True:
            turn = next((turn for _, turn in self._waiting if not turn.done()), None)
            self._waiting = type(self._waiting)(
                one for one in self._waiting if one[1] is not turn and not one[1].done()
            )
            if turn is None:
                await asyncio.sleep(0.002)
                continue
            await asyncio.sleep(ANSWER_SECONDS * (LONGER if QUIET <= (self.version or 0) < QUIET + BUSY else 1))
            if not turn.done():
                turn.set_result(None)


async def serve(host: str, port: int) -> None:
    """Run one engine until it is killed."""
    runner = web.AppRunner(LoadedEngine().app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


@dataclass
class Fleet:
    """Engines in processes, on different addresses with one port, like pods."""

    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    seconds: float = 0.0
    """Total time of all engines."""
    most: int = 0
    _made: int = 0
    _looked: float = field(default_factory=time.monotonic)

    async def look_up(self, host: str, port: int) -> list[str]:
        """Resolve a name to the live engines."""
        if not self.processes:
            raise OSError("no engine yet")
        return list(self.processes)

    def keep(self, wanted: int, drained: Sequence[str]) -> None:
        """Start missing engines; end drained ones above the wanted number."""
        now = time.monotonic()
        self.seconds += len(self.processes) * (now - self._looked)
        self._looked = now
        while len(self.processes) < wanted:
            self._made += 1
            host = f"127.0.1.{self._made}"
            command = [sys.executable, "-m", "benchmarks.elastic_engines", "--engine", host, str(self.port)]
            self.processes[host] = subprocess.Popen(command)
        for host in [host for host in drained if host in self.processes][: max(0, len(self.processes) - wanted)]:
            self._end(host)
        self.most = max(self.most, len(self.processes))

    def _end(self, host: str) -> None:
        process = self.processes.pop(host)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def lives(self) -> Iterator[None]:
        """End all engines with the block."""
        try:
            yield
        finally:
            for host in list(self.processes):
                self._end(host)


async def operate(fleet: Fleet, engine_requests: EngineRequests, url: str, rules: Rules) -> None:
    """Decide and scale until cancelled, as the operator does by Lease and Deployment."""
    wanted, drained = rules.least, ()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {API_KEY}"}) as session:
        while True:
            fleet.keep(wanted, drained)
            await asyncio.sleep(LOOK_SECONDS)
            try:
                async with session.get(url) as response:
                    found = await response.json()
            except aiohttp.ClientError:
                continue
            load, drained = found["engine_load"], found["engines_drained"] or ()
            choice = choose_engines(wanted, EngineLoad(**load) if load else None, rules)
            if choice.why:
                logger.info(f"step {found['step']}: {wanted} to {choice.engines} engines: {choice.why}")
            wanted = engine_requests.engines = choice.engines
            engine_requests.window_seconds = rules.stabilization_seconds


@dataclass(frozen=True)
class Outcome:
    """Measures of one run."""

    name: str
    seconds: float
    waited: tuple[float, float, float]
    """Share of the time that the trainer waited: quiet, busy, and quiet again."""
    engines: float
    """Average number of engines."""
    most: int
    moved: int
    lost: int
    """Number of groups that were dispatched again, dropped, or are missing."""


async def measure(name: str, rules: Rules, folder: Path, tokenizer: Path) -> Outcome:
    """Measure one run."""
    fleet, engine_requests, paths, steps = Fleet(), EngineRequests(), RunPaths(folder), QUIET + BUSY + AFTER
    config = make_config(folder, tokenizer, max_steps=steps, batch_size=GROUPS * MEMBERS, checkpoint={"enabled": False})
    trainer = FakeTrainer(paths, begin(paths, 1), steps, steps, lambda: STEP_SECONDS)
    with fleet.lives():
        async with trainer:
            service = f"http://engines:{fleet.port}"
            config = config.model_copy(update={"trainer_url": trainer.url, "inference_service": service})
            url = f"http://127.0.0.1:{config.metrics_port}{endpoints.ORCHESTRATOR_PROGRESS}"
            operator = asyncio.create_task(operate(fleet, engine_requests, url, rules))
            try:
                outside = Outside(look_up=fleet.look_up, open_environments=in_process, engine_requests=engine_requests)
                assert await orchestrate_attempt(config, attempt=1, api_key=API_KEY, outside=outside) == 0
            finally:
                operator.cancel()
    return _outcome(name, read_metrics(paths.metrics)[0], trainer, fleet)


def _outcome(name: str, lines: Sequence[dict[str, float]], trainer: FakeTrainer, fleet: Fleet) -> Outcome:
    published = [trainer.published[step] for step in range(len(lines) + 1)]
    bounds = (1, QUIET, QUIET + BUSY, QUIET + BUSY + AFTER)
    waited = [
        sum(line["time/wait_for_batch"] for line in lines[first:last]) / (published[last] - published[first])
        for first, last in itertools.pairwise(bounds)
    ]
    again = sum(
        value for line in lines for key, value in line.items() if key.startswith(("groups/dropped", "groups/cancelled"))
    )
    errors = sum(line.get("errors", 0) for line in lines)
    groups = {sample.group for batch in trainer.batches for sample in batch.samples}
    missing = len(lines) * GROUPS - len(groups)
    seconds = published[-1] - published[0]
    return Outcome(
        name,
        seconds,
        (waited[0], waited[1], waited[2]),
        fleet.seconds / seconds,
        fleet.most,
        int(lines[-1]["engines/moved_requests"]),
        int(again + errors) + missing,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    few, many = (factor * GROUPS * ANSWER_SECONDS / STEP_SECONDS for factor in (1, LONGER))
    lines = [
        "# Fixed and elastic engines",
        "",
        f"`python -m benchmarks.elastic_engines --write`; {os.cpu_count()} cores ({platform.machine()}). The real orchestrator with",
        f"`maxAsyncLevel` 2, a trainer of {STEP_SECONDS} s a step that only keeps time, engines in processes of their own that answer one",
        f"group after the other in {ANSWER_SECONDS} s. {QUIET} steps, then {BUSY} whose answers take {LONGER} times as long, then",
        f"{AFTER} as in the beginning: {few:.1f}, {many:.1f} and again {few:.1f} engines have work all the time. The operator's own",
        f"decision in the loop, with `autoscale: {{min: {RULES.least}, max: {RULES.most}, targetWait: {RULES.target_wait}}}` and",
        f"`stabilizationSeconds` {RULES.stabilization_seconds:g}, because the steps are short. The share of the time that the trainer",
        "waited for rollouts holds what it takes to notice the change, to start a process, and to hand it the weights.",
        "",
        "| engines | seconds | waited | waited, long answers | waited, short again | engines on average | at most | requests moved "
        "| rollouts lost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in outcomes:
        shares = " | ".join(f"{share:.1%}" for share in one.waited)
        lines.append(
            f"| {one.name} | {one.seconds:.0f} | {shares} | {one.engines:.1f} | {one.most} | {one.moved} | {one.lost} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs=2, metavar=("HOST", "PORT"), help="be an engine")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args(argv)
    if options.engine:
        asyncio.run(serve(options.engine[0], int(options.engine[1])))
    logger.remove()
    logger.add(sys.stderr, filter=lambda record: record["name"] == __name__, format="{message}")
    from rlrun.trainer.modeling.tiny_model import make_tokenizer

    fixed = [(f"{n} fixed", Rules(n, n, 0.05, 5.0)) for n in (1, 2, 4)]
    outcomes = []
    for name, rules in (*fixed, (f"elastic, {RULES.least} to {RULES.most}", RULES)):
        with tempfile.TemporaryDirectory() as folder:
            make_tokenizer().save_pretrained(Path(folder) / "tokenizer")
            outcomes.append(asyncio.run(measure(name, rules, Path(folder) / "run", Path(folder) / "tokenizer")))
            print(outcomes[-1], flush=True)
    text = table(outcomes)
    print(text)
    if options.write:
        RESULTS.write_text(text)
    return 1 if any(one.lost for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
