"""A whole run without a model: the real orchestrator and channel, a trainer that only keeps time, and engines with
invented tokens."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments.registry import load_environment
from rlrun.environments.stage import InProcessStage
from rlrun.inference.client.completions import EngineMetrics
from rlrun.inference.client.engine_client import Completion, EngineError, EngineUnavailableError
from rlrun.local.preflight import free_port
from rlrun.orchestrator.aio.event_loop import Background
from rlrun.orchestrator.attempt import Stop
from rlrun.orchestrator.engines.replica import Engine
from rlrun.orchestrator.main import OpenEnvironments, Outside, orchestrate_attempt
from rlrun.orchestrator.rollouts.environment_pool import Arena, arenas_of
from rlrun.protocol.files.attempts import Attempt, first_attempt, next_attempt, read_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, read_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, complete_checkpoints, write_manifest
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.channel.run_channel import Channel
from tests.support.waiting import result_of, wait_until_async

API_KEY = "key"
TRAINED = {"loss": 0.5, "perf/throughput": 10.0}
"""The trainer's metrics of each step."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another task makes true."""
    await wait_until_async(condition, poll_seconds=0.001)


@dataclass
class FakeEngine:
    """Engine that generates replies of random letters, one token at a time, each labelled with the engine's version at
    that time."""

    seconds_per_token: Callable[[], float] = lambda: 0.0
    letters: Sequence[int] = tuple(range(78, 84))
    eos: int = 2
    update_seconds: float = 0.0
    version: int | None = None
    down: bool = False
    held: list[int] = field(default_factory=list)
    """Versions in the order of their hand-overs."""
    requests: list[tuple[float, str | None, int | None, int]] = field(default_factory=list)
    """Time, cache salt, version at arrival, and number of requested continuations."""
    seen: list[list[int]] = field(default_factory=list)
    """Every computed sequence of tokens: prompt and reply."""
    aborted: int = 0
    running: int = 0
    """Requests in flight."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    asleep: bool = False
    """Whether it has released its memory; it wakes with the next hand-over."""
    slept: int = 0
    gpus_taken: Callable[[], bool] = lambda: False
    """Whether the trainer has the GPUs at the moment."""
    insomnia: int = 0
    """Number of sleep requests that fail before one succeeds."""

    wrong: list[str] = field(default_factory=list)
    """Invalid requests that it received."""

    def _expect(self, right: bool, otherwise: str) -> None:
        if not right:
            self.wrong.append(otherwise)
            raise AssertionError(otherwise)

    async def sleep(self) -> None:
        if self.insomnia:
            self.insomnia -= 1
            raise EngineUnavailableError("connection reset")
        self._expect(not self.running, "it was put to sleep with requests in flight")
        self.asleep = True
        self.slept += 1

    async def generate(
        self, token_ids: Sequence[int], *, n: int, max_tokens: int, cache_salt: str | None, **_: Any
    ) -> list[Completion]:
        if self.down:
            raise EngineUnavailableError("connection refused")
        assert self.version is not None, "a request came before any weights"
        self._expect(not self.asleep, "a request came to an engine that sleeps")
        self.requests.append((time.monotonic(), cache_salt, self.version, n))
        self.running += 1
        try:
            completions = [await self._continue(max_tokens) for _ in range(n)]
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        self.seen += [[*token_ids, *completion.token_ids] for completion in completions]
        return completions

    async def _continue(self, max_tokens: int) -> Completion:
        tokens: list[int] = []
        versions: list[int] = []
        wanted = [self.rng.choice(self.letters) for _ in range(self.rng.randint(2, 5))] + [self.eos]
        for token in wanted[:max_tokens]:
            await asyncio.sleep(self.seconds_per_token())
            if self.down:
                raise EngineUnavailableError("connection reset")
            assert self.version is not None
            tokens.append(token)
            versions.append(self.version)
        finish = "stop" if tokens[-1] == self.eos else "length"
        return Completion(tokens, [-0.5 - 0.01 * token for token in tokens], versions, finish)

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        if self.down:
            raise EngineUnavailableError("connection refused")
        if self.version is not None and version < self.version and not force:
            raise EngineError("older than what is served", 409)
        await asyncio.sleep(self.update_seconds)
        self._expect(not self.gpus_taken(), "it was given weights in the trainer's turn")
        self.version, self.asleep = version, False
        self.held.append(version)
        return {"total": self.update_seconds}

    async def status(self) -> dict[str, Any]:
        if self.down:
            raise EngineUnavailableError("connection refused")
        return {"weight_version": self.version}

    async def metrics(self) -> EngineMetrics:
        raise EngineError("/metrics lacks 'vllm:num_requests_running'")

    async def close(self) -> None:
        return


@dataclass
class FakeTrainer:
    """Trainer that publishes versions, takes batches in order and saves checkpoints, without computation."""

    paths: RunPaths
    attempt: Attempt
    max_steps: int
    checkpoint_interval: int
    step_seconds: Callable[[], float] = lambda: 0.0
    batches: list[Batch] = field(default_factory=list)
    published: dict[int, float] = field(default_factory=dict)
    """Time at which each version was published."""
    hold_checkpoints: bool = False
    """Whether checkpoints never become complete."""
    silent: bool = False
    look_seconds: float = 0.001
    """Time between two polls for a batch."""
    beside: Sequence[FakeEngine] = ()
    """Engines that share its GPUs in turns."""
    has_gpus: bool = True
    """Whether it has the GPUs: from the start until it has published its first version."""

    async def __aenter__(self) -> FakeTrainer:
        write_attempt(self.paths, self.attempt)
        number = self.attempt.attempt
        self.channel = Channel.start_server(
            attempt=number, api_key=API_KEY, host="127.0.0.1", port=0, batch_path=lambda s: self.paths.batch(s, number)
        )
        self.url = f"http://127.0.0.1:{self.channel.port}"
        self.agreed: queue.Queue[int] = queue.Queue()
        self.channel.agreed = self._complete
        self.task = asyncio.create_task(self._train())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if not self.silent:
            # In the background, because the server waits a second for long polls without a client.
            threading.Thread(target=self.channel.close, daemon=True).start()

    async def fall_silent(self) -> None:
        """Stop answering."""
        self.silent = True
        await asyncio.to_thread(self.channel.close)

    def _publish(self, version: int) -> None:
        self.published[version] = time.monotonic()
        self.channel.append_event("published", version, path=self.paths.version(version, self.attempt.attempt))

    def _complete(self, step: int) -> None:
        if self.hold_checkpoints:
            return
        folder = self.paths.checkpoint(step, self.attempt.attempt)
        write_manifest(folder, Manifest(step, self.attempt.attempt, 1, "hash", (), time.time()))
        self.channel.append_event("checkpoint_complete", step, path=folder)

    async def _next(self) -> Path:
        while True:
            try:
                return Path(self.channel.batches.get_nowait().path)
            except queue.Empty:
                await asyncio.sleep(self.look_seconds)

    async def _release(self, version: int) -> None:
        if self.beside:
            await asyncio.sleep(self.step_seconds())  # published long before it has released its memory
            self.has_gpus = False
            self.channel.append_event("released", version)

    async def _train(self) -> None:
        base = self.attempt.base_step
        self.channel.accept_batches(base)
        self.channel.phase("publishing")
        self._publish(base)
        await self._release(base)
        for step in range(base + 1, self.max_steps + 1):
            self.channel.phase("waiting_for_batch")
            since = time.monotonic()
            batch = await asyncio.to_thread(read_batch, await self._next())
            assert (batch.step, batch.attempt) == (step, self.attempt.attempt)
            waited = time.monotonic() - since
            self.channel.phase("training")
            assert all(engine.asleep for engine in self.beside), "it was told to train while an engine was awake"
            self.has_gpus = True
            await asyncio.sleep(self.step_seconds())
            self.batches.append(batch)
            self._publish(step)
            self.channel.append_event("trained", step, metrics=TRAINED | {"time/wait_for_batch": waited})
            if step % self.checkpoint_interval == 0 or step == self.max_steps:
                folder = self.paths.checkpoint(step, self.attempt.attempt)
                (folder / "trainer").mkdir(parents=True)
                self.channel.append_event("checkpoint_saved", step, path=folder)
            await self._release(step)
        self.channel.append_event("finished", self.max_steps)


def begin(paths: RunPaths, number: int) -> Attempt:
    """Start the attempt that the real trainer would start: from the newest complete checkpoint of the previous attempt."""
    if number == 1:
        return first_attempt(world_size=1, config_hash="hash")
    before = read_attempt(paths.attempt_file(number - 1))
    complete = before.owned(complete_checkpoints(paths))
    if not complete:
        return first_attempt(world_size=1, config_hash="hash", attempt=number)
    return next_attempt(before, complete[-1].step, attempt=number, world_size=1, config_hash="hash")


def make_config(root: Path, tokenizer: Path, **changes: Any) -> OrchestratorConfig:
    """Return a small run of `reverse-text`: 4 groups of 2 rollouts per step."""
    document: dict[str, Any] = {
        "name": "test",
        "uid": "uid",
        "output_dir": str(root),
        "model": {"path": str(tokenizer)},
        "max_steps": 6,
        "seq_len": 64,
        "seed": 1,
        "batch_size": 8,
        "max_concurrency": 64,
        "algorithm": {"max_async_level": 2, "max_off_policy_steps": 4},
        "environments": [{"id": "reverse-text", "group_size": 2}],
        "sampling": {"max_tokens": 8},
        "evaluation": None,
        "checkpoint": {"interval": 2},
        "weight_sync": {"timeout_seconds": 5},
        "metrics_port": free_port(),
    }
    return OrchestratorConfig.model_validate(document | changes)


@dataclass
class Outcome:
    """Result of a simulated attempt."""

    code: int | None
    trainer: FakeTrainer
    engines: list[FakeEngine]
    paths: RunPaths

    @property
    def groups(self) -> list[list[int]]:
        """Group numbers of each trained batch, in order of step."""
        return [sorted({sample.group for sample in batch.samples}) for batch in self.trainer.batches]


@asynccontextmanager
async def in_process(
    environments: Sequence[EnvironmentConfig], logs: Path, background: Background
) -> AsyncIterator[list[Arena]]:
    """Run environments in this process, because a process takes half a second to start and most tests do not need it."""
    yield arenas_of(environments, [InProcessStage(load_environment(e.id, e.args)) for e in environments])


async def simulate(
    config: OrchestratorConfig,
    *,
    engines: Sequence[FakeEngine] | None = None,
    number: int = 1,
    step_seconds: Callable[[], float] = lambda: 0.0,
    until: Callable[[FakeTrainer], bool] | None = None,
    during: Callable[[FakeTrainer], Any] | None = None,
    hold_checkpoints: bool = False,
    stop: Stop | None = None,
    open_environments: OpenEnvironments = in_process,
    loaded: Callable[[], None] = lambda: None,
) -> Outcome:
    """Simulate one attempt to its end, or until `until` is true: then the orchestrator and the trainer are killed.

    `during` is a coroutine function that plays the outside world. A run without progress fails.
    """
    paths = RunPaths(Path(config.output_dir))
    engines = list(engines or [FakeEngine()])
    trainer = FakeTrainer(
        paths,
        begin(paths, number),
        config.max_steps,
        config.checkpoint.interval,
        step_seconds,
        hold_checkpoints=hold_checkpoints,
    )
    if config.colocated:
        trainer.beside = engines
        for engine in engines:
            engine.gpus_taken = lambda: trainer.has_gpus
            engine.asleep = True
    async with trainer:
        urls = [f"http://engine-{i}" for i in range(len(engines))]
        resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_urls": urls})
        by_url = dict(zip(urls, engines, strict=True))
        work = asyncio.create_task(
            orchestrate_attempt(
                resolved,
                attempt=number,
                api_key=API_KEY,
                stop=stop,
                loaded=loaded,
                outside=Outside(connect=lambda url: cast(Engine, by_url[url]), open_environments=open_environments),
            )
        )
        world = asyncio.create_task(during(trainer)) if during is not None else None

        def progress() -> object:
            return len(trainer.batches), [len(engine.requests) for engine in engines]

        try:
            if until is not None:
                await wait_until_async(
                    lambda: until(trainer) or work.done(), progress=progress, state=progress, poll_seconds=0.001
                )
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                return Outcome(None, trainer, engines, paths)
            first = asyncio.wait({work, trainer.task}, return_when=asyncio.FIRST_COMPLETED)
            await result_of(first, "the end of the run or of its trainer", progress=progress)
            wrong = trainer.task.exception() if trainer.task.done() and not trainer.task.cancelled() else None
            if isinstance(wrong, AssertionError):  # it received an invalid request
                raise wrong
            code = await result_of(work, "the end of the run", progress=progress)
        finally:
            work.cancel()
            if world is not None:
                world.cancel()
                await asyncio.gather(world, return_exceptions=True)
        return Outcome(code, trainer, engines, paths)
