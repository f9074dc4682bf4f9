"""Simulated day with one fault per minute: the operator's memory, its queue and its API requests."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, field
from random import Random

from tests.sim.actions import ACTIONS
from tests.sim.operator.process import Process
from tests.sim.world import ViolationError, World

ALLOWED_SECONDS = 600
"""Interval at which all refusals and taken names are lifted, because a day of waiting measures nothing."""
SECONDS = 24 * 3600
RENEWAL_SECONDS = 15
FAULTS = (
    "API fault",
    "API fault later",
    "events lost",
    "events twice",
    "process ends",
    "pod goes",
    "pods forced away",
    "workload deleted",
    "lease deleted",
    "workload scaled",
    "annotated",
    "node stops",
    "node tainted",
    "node starts",
    "operator dies",
    "other release",
    "leader replaced",
    "late request",
    "past again",
    "child edited",
    "claim deleted",
    "name taken",
    "name free",
    "name free",
    "refused",
    "allowed",
    "allowed",
    "late warning",
)
"""Faults that end a disturbance occur twice as often as those that start one, so that the run stays alive."""
ENDING_CODES = list(range(64, 79))
"""Exit codes that end a run permanently without a rule in its failure policy."""
NO_END = {
    "maxSteps": 10**6,
    "failurePolicy": {
        "maxRestarts": 10_000,
        "backoff": {"initialSeconds": 4, "maxSeconds": 20},
        "rules": [{"name": "go-on", "action": "Restart", "onExitCodes": ENDING_CODES}],
    },
}


@dataclass
class Hour:
    """Figures at the end of an hour."""

    number: int
    faults: int
    attempts: int
    steps: int
    writes: int
    """Write requests of this hour, including failed ones."""
    passes: int
    longest_queue: int
    kilobytes: float
    """Kilobytes held by the operator and the cluster in memory."""


@dataclass
class Day:
    """Hours of the day."""

    hours: list[Hour] = field(default_factory=list)

    def table(self) -> str:
        """Return the hours as a Markdown table."""
        head = "| hour | faults | attempts | steps | API writes | passes | longest queue | memory kB |\n|" + "---|" * 8
        rows = [
            f"| {h.number} | {h.faults} | {h.attempts} | {h.steps} | {h.writes} | {h.passes} | {h.longest_queue} | {h.kilobytes:.0f} |"
            for h in self.hours
        ]
        return "\n".join([head, *rows])


TABLE_BYTES = 100_000
"""Size limit of blocks: larger ones are tables of the interpreter, which may be reallocated at any time; that of
interned strings has 2 MB.
"""
WARM_ROUNDS = 6
"""Rounds of another run before the measurement, which fill the process's caches of schemas."""


def _held_bytes() -> int:
    """Return the bytes allocated since the start of the measurement and still held, except large single tables; real
    growth has many blocks.
    """
    return sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size < TABLE_BYTES)


def live_through(hours: int = 24, seed: int = 1, *, kinds: tuple[str, ...] = FAULTS) -> Day:
    """Simulate a day of one run and its operator.

    Raises:
        ViolationError: an invariant broke, or the run died, which would make the measurement meaningless.
    """
    World(NO_END, seed).calm(WARM_ROUNDS)
    gc.collect()
    random, day = Random(seed), Day()
    world = World(NO_END, seed)
    faults = passes = longest = steps_before = writes_before = 0
    operator: Process = world.operator
    seen = 0
    tracemalloc.start()
    for second in range(1, hours * 3600 + 1):
        if second % 60 == 0:
            name = random.choice(kinds)
            ACTIONS[name].do(world, random.randrange(12), random.randrange(12))
            faults += 1
        if second % ALLOWED_SECONDS == 0:
            world.lift(world.api.refusals)
            world.remove_foreign()
        if operator is not world.operator:
            operator, seen = world.operator, 0
        world.memory.actions = faults
        if second % RENEWAL_SECONDS == 0:
            world.cluster.train(1, 10**6)
        if world.news or world.api.news or world.operator.queue.count_ready(world.clock.steady()) or second % 5 == 0:
            world.hear()
            longest = max(longest, world.operator.queue.count_ready(world.clock.steady()))
            world.operate()
            world.cluster.round()
            world.check()
        world.pass_time(1.0)
        passes, seen = passes + world.operator.passes - seen, world.operator.passes
        if second % 3600 == 0:
            gc.collect()
            steps = max(world.cluster.volume.step.values(), default=0)
            kilobytes = _held_bytes() / 1000
            attempts = world.status.get("attempt", 0)
            writes = world.api.writes
            day.hours.append(
                Hour(
                    second // 3600,
                    faults,
                    attempts,
                    steps - steps_before,
                    writes - writes_before,
                    passes,
                    longest,
                    kilobytes,
                )
            )
            if world.status.get("phase") == "Failed" or steps == steps_before:
                told = f"{world.status.get('phase')}: {world.status.get('message')}"
                raise ViolationError(f"hour {second // 3600}: {steps - steps_before} steps, the run is {told}")
            passes, longest, steps_before, writes_before = 0, 0, steps, writes
    tracemalloc.stop()
    world.rest()
    if world.status.get("phase") != "Running":
        raise ViolationError(f"at its end the run is {world.status.get('phase')}: {world.status.get('message')}")
    return day
