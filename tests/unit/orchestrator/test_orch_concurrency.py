"""Concurrency limit of an engine, controlled with the metrics of a simulated engine."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from rlrun.inference.client.completions import EngineMetrics
from rlrun.orchestrator.engines.replica import Concurrency

GROUP = 4
PLACES = 32
BLOCK_TOKENS = 32
LOOK_SECONDS = 2.0


@dataclass(eq=False)
class Sequence:
    """One completion of a request."""

    request: int
    length: int
    done: int = 0
    blocks: int = 0

    @property
    def needed(self) -> int:
        """Number of KV cache blocks that the sequence needs for its next token."""
        return math.ceil((self.done + 12) / BLOCK_TOKENS)


@dataclass
class PlayedEngine:
    """Simulated vLLM engine with a first-come-first-served queue.

    If a sequence finds no free block for its next token, the newest sequence is preempted and recomputed later.
    """

    blocks: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    queue: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    asked: dict[int, list[Sequence]] = field(default_factory=dict)
    """Unfinished requests."""
    begun: int = 0
    seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0

    @property
    def in_flight(self) -> int:
        return GROUP * len(self.asked)

    @property
    def free(self) -> int:
        return self.blocks - sum(sequence.blocks for sequence in self.running)

    @property
    def metrics(self) -> EngineMetrics:
        return EngineMetrics(len(self.running), len(self.queue), 1 - self.free / self.blocks, self.preemptions)

    def ask(self) -> None:
        self.begun += 1
        lengths = [max(1, min(384, int(self.rng.lognormvariate(3.4, 1.2)))) for _ in range(GROUP)]
        self.asked[self.begun] = [Sequence(self.begun, length) for length in lengths]
        self.queue += self.asked[self.begun]

    def step(self, control: Concurrency | None) -> None:
        again = 0
        while self.queue and len(self.running) < PLACES and self.queue[0].needed <= self.free:
            admitted = self.queue.pop(0)
            admitted.blocks, again = admitted.needed, again + admitted.done
            self.running.append(admitted)
        for sequence in list(self.running):
            while sequence in self.running and sequence.needed > sequence.blocks:
                if self.free:
                    sequence.blocks += 1
                else:
                    last = self.running.pop()
                    last.blocks, self.preemptions = 0, self.preemptions + 1
                    self.queue.insert(0, last)
        for sequence in self.running:
            sequence.done += 1
        self.tokens += len(self.running)
        self.seconds += 0.008 + 0.0005 * len(self.running) + 0.00005 * again
        self.running = [sequence for sequence in self.running if sequence.done < sequence.length]
        for request, sequences in list(self.asked.items()):
            if all(sequence.done >= sequence.length for sequence in sequences):
                del self.asked[request]
                if control is not None:
                    control.answered([sequence.length for sequence in sequences])


@dataclass(frozen=True)
class Found:
    """Averages over the time after the engine has settled."""

    per_second: float
    running: float
    preemptions: float
    """Preemptions per second."""


def play(engine: PlayedEngine, limit: Concurrency | int, *, settle: float = 30.0, seconds: float = 90.0) -> Found:
    """Keep the engine at the limit and return its averages."""
    control = limit if isinstance(limit, Concurrency) else None
    look, before, running = LOOK_SECONDS, (0.0, 0, 0), list[int]()
    while engine.seconds < settle + seconds:
        most = limit.limit if isinstance(limit, Concurrency) else limit
        while engine.in_flight + GROUP <= most:
            engine.ask()
        engine.step(control)
        if engine.seconds < settle:
            before = (engine.seconds, engine.tokens, engine.preemptions)
        else:
            running.append(len(engine.running))
        if control is not None and engine.seconds > look:
            look += LOOK_SECONDS
            control.observe(engine.metrics, engine.in_flight)
    took = engine.seconds - before[0]
    return Found(
        (engine.tokens - before[1]) / took, sum(running) / len(running), (engine.preemptions - before[2]) / took
    )


def test_long_tailed_groups_do_not_leave_engine_idle() -> None:
    engine, control = PlayedEngine(blocks=10_000), Concurrency(160)
    found = play(engine, control)
    assert found.running >= 0.92 * PLACES
    assert len(engine.queue) <= PLACES
    assert control.limit < 160


def test_small_kv_cache_stays_busy_without_thrashing() -> None:
    best = max(play(PlayedEngine(blocks=64), limit).per_second for limit in (32, 48, 160))
    thrashing = play(PlayedEngine(blocks=64), 160)
    control = Concurrency(256)
    control.observe(EngineMetrics(0, 0, 0.0, preemptions=0), 256)  # the engine has not counted the sent requests yet
    steered = play(PlayedEngine(blocks=64), control)
    assert steered.preemptions < 0.15 * thrashing.preemptions
    assert steered.per_second >= 0.85 * best
