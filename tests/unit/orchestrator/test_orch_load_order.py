"""Index of engines by version and load: the same choices as a full scan, at constant cost."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_simulation import FakeEngine, eventually

from rlrun.inference.client.completions import EngineMetrics
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.load_order import SLOWNESS_STEP, STICKY_SLACK
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.engines.weight_sync import WeightSync

CEILING = 32
FAST = 0.01
SLOW_PACE = 0.05


def pool_of(engines: int, ceiling: int = CEILING) -> EnginePool:
    replicas = [Replica(f"http://e{i}", FakeEngine(), version=3, trusted=True) for i in range(engines)]
    return EnginePool(replicas, Signal(), max_concurrency=ceiling)


def opcodes(act: Callable[[], object]) -> int:
    """Return the number of Python bytecode instructions that `act` executes. Unlike time, it is the same in each run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def requests(pool: EnginePool, number: int) -> None:
    """Start and end requests while most engines are at their limit."""

    async def run() -> None:
        for count in (1, 8) * number:
            replica = await pool.acquire(None, None, count)
            pool.room(), pool.limited, pool.version
            replica.succeed(1.0, [10] * count)
            pool.release(replica, count)

    coroutine = run()
    with pytest.raises(StopIteration):
        coroutine.send(None)


def busy(engines: int) -> EnginePool:
    """Build engines of two speeds, almost all of which are full or have a low limit."""
    pool = pool_of(engines)
    for number, replica in enumerate(pool.replicas):
        replica.succeed(1.0 if number % 3 else 3.0, [10])
        if number % 8:
            replica.load = CEILING if number % 2 else CEILING - 4
        elif number % 16:
            replica.concurrency.observe(EngineMetrics(4, 60, 0.5), 64)
            replica.load = 3
    return pool


@pytest.fixture
def one_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the slowness of all engines only once, so that the speed of this machine does not matter."""
    monkeypatch.setattr("rlrun.orchestrator.engines.load_order.REFRESH_SECONDS", math.inf)


@pytest.mark.usefixtures("one_refresh")
def test_request_cost_is_independent_of_engine_count() -> None:
    cost = {}
    for engines in (64, 512):
        pool = busy(engines)
        requests(pool, 1)
        cost[engines] = opcodes(lambda pool=pool: requests(pool, 8))  # type: ignore[misc]
    assert cost[512] <= 1.25 * cost[64], cost


@pytest.mark.usefixtures("one_refresh")
async def test_queued_request_cost_is_independent_of_engine_count() -> None:
    cost = {}
    for engines in (64, 512):
        pool = pool_of(engines)
        for replica in pool.replicas:
            replica.load = CEILING - 4
        assert pool._choose_replica(None, None, 8, ()) is None
        coroutine = pool.acquire(None, None, 8)
        cost[engines] = opcodes(lambda coroutine=coroutine: coroutine.send(None))  # type: ignore[misc]
        coroutine.close()
    assert cost[512] <= 1.25 * cost[64], cost


async def test_unrelated_signal_does_not_wake_every_weight_update() -> None:
    looks = 0

    class Counting(WeightSync):
        def wanted(self, replica: Replica) -> int | None:
            nonlocal looks
            looks += 1
            return super().wanted(replica)

    signal = Signal()
    pool = EnginePool([Replica(f"http://e{i}", FakeEngine()) for i in range(64)], signal)
    sync = Counting(pool, signal, timeout_seconds=60)
    sync.publish(1, "weights", hold=False)
    keeping = asyncio.create_task(sync.run())
    await eventually(lambda: len(pool.candidates(1)) == 64)
    before = looks
    for _ in range(20):
        signal.notify()
        await asyncio.sleep(0)
    assert looks == before
    pool.fail(pool.replicas[5], "it is broken")
    await eventually(lambda: len(pool.candidates(1)) == 64)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_removed_engine_stays_out_of_load_order() -> None:
    pool = pool_of(2)
    gone, left = pool.replicas
    assert await pool.acquire(gone, None, 4) is gone
    pool.remove(gone, "it has no address any more")
    gone.version = 3
    gone.concurrency.forget()
    pool.release(gone, 4)
    assert (pool.candidates(), pool.in_flight, pool.room()) == ([left], 0, CEILING)


class Oracle:
    """Reference implementation of the pool's rule: a scan of all engines."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool

    def candidates(self) -> list[Replica]:
        held = [r for r in self.pool.replicas if r.version is not None and not r.draining]
        newest = max((r.version for r in held if r.version is not None), default=None)
        return [r for r in held if r.version == newest and r.open]

    def free(self, count: int, avoid: list[Replica]) -> list[Replica]:
        candidates = self.candidates()
        allowed = [r for r in candidates if r not in avoid] or candidates
        return [r for r in allowed if r.room(count)]

    def cost(self, replica: Replica, count: int) -> float:
        fastest = min((r.seconds_per_token for r in self.candidates() if r.seconds_per_token), default=None)
        return (replica.load + count) * replica.slowness(fastest)

    def check(self, chosen: Replica | None, prefer: Replica | None, count: int, avoid: list[Replica]) -> None:
        free = self.free(count, avoid)
        assert (chosen is None) == (not free)
        if chosen is None:
            return
        assert chosen in free
        best = min(self.cost(replica, count) for replica in free)
        # Engines of the same slowness are sorted by load only.
        slack = SLOWNESS_STEP if any(self.cost(r, 1) > r.load + 1 for r in free) else 1.0
        if prefer in free and chosen is prefer:
            assert (
                self.cost(prefer, count - STICKY_SLACK) <= best * slack + 1e-9
                or self.cost(prefer, count) <= best * slack
            )
        else:
            assert self.cost(chosen, count) <= best * slack + 1e-9


CHANGES = st.tuples(
    st.sampled_from(
        ["ask", "ask", "ask", "end", "answer", "slow", "limit", "forget", "fail", "back", "drain", "update"]
    ),
    st.integers(0, 5),
    st.sampled_from([1, 1, 4, 16]),
)


def histories(changes: list[tuple[str, int, int]]) -> None:
    pool = pool_of(6, ceiling=24)
    oracle, asked = Oracle(pool), list[tuple[Replica, int]]()
    for name, number, count in changes:
        replica = pool.replicas[number]
        match name:
            case "ask":
                avoid = pool.replicas[:number] if count == 4 else []
                chosen = pool._choose_replica(replica, None, count, avoid)
                oracle.check(chosen, replica, count, avoid)
                if chosen is not None:
                    chosen.load += count
                    asked.append((chosen, count))
            case "end" if asked:
                pool.release(*asked.pop(number % len(asked)))
            case "answer" | "slow":
                replica.succeed(10 * (FAST if name == "answer" else SLOW_PACE), [10] * count)
            case "limit":
                replica.concurrency.observe(EngineMetrics(count, 60, 0.5), 100)
            case "forget":
                replica.concurrency.forget()
            case "fail":
                pool.fail_request(replica, replica.rotation, "it is broken")
            case "back":
                replica.version = 3
            case "drain":
                replica.draining = not replica.draining
            case "update":
                replica.updating = not replica.updating
        # Each change may remove the fastest engine; the slowness of the others follows within a second.
        if name not in ("ask", "end") and (loads := pool._order.loads_of(3)) is not None:
            loads._refreshed = -math.inf
        candidates = oracle.candidates()
        free = sum(max(0, r.concurrency.limit - r.load) for r in candidates)
        assert pool.candidates() == candidates
        assert (pool.room(), pool.usable) == (free, bool(candidates))
        assert pool.limited == any(r.concurrency.limit < 24 for r in candidates)
        assert pool.in_flight == sum(r.load for r in pool.replicas)


@settings(deadline=None, max_examples=40)
@given(st.lists(CHANGES, max_size=60))
def test_load_order_matches_full_scan(changes: list[tuple[str, int, int]]) -> None:
    histories(changes)


@pytest.mark.full
@settings(deadline=None, max_examples=2000)
@given(st.lists(CHANGES, max_size=200))
def test_choices_and_sums_of_long_histories(changes: list[tuple[str, int, int]]) -> None:
    histories(changes)
