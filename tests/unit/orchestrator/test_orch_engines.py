"""Engine selection, concurrency limits and refused completions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_simulation import FakeEngine, eventually

from rlrun.config.models.rollout import SamplingConfig
from rlrun.inference.client.completions import EngineMetrics
from rlrun.inference.client.engine_client import Completion, EngineError, EngineUnavailableError
from rlrun.orchestrator.aio.event_loop import Signal, Turns
from rlrun.orchestrator.engines.discovery import MISSES, Monitor, Pace
from rlrun.orchestrator.engines.load_order import STICKY_SLACK
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import REST_LOOKS, Concurrency, Replica
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.rollouts.engine_session import Session, derived_seed


class Scripted(FakeEngine):
    """Engine that answers each request with the next scripted token versions or error."""

    def script(self, *answers: list[int] | EngineError) -> Scripted:
        self.answers = list(answers)
        return self

    async def generate(self, token_ids: object, *, n: int, **_: object) -> list[Completion]:  # type: ignore[override]
        answer = self.answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return [Completion([7] * len(answer), [-1.0] * len(answer), answer, "stop")] * n


def in_rotation(version: int = 3, client: FakeEngine | None = None, name: str = "a") -> Replica:
    return Replica(f"http://{name}", client or FakeEngine(), version=version, handed=version, trusted=True)


async def test_work_is_shared_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = in_rotation(name="fast"), in_rotation(name="slow")
    pool = EnginePool([fast, slow], Signal())
    got = Counter([(await pool.acquire(None, None, 1)).url for _ in range(100)])
    assert got == {"http://fast": 50, "http://slow": 50}, "nothing is known yet"
    for replica in (fast, slow):
        pool.release(replica, 50)
    for _ in range(30):
        fast.succeed(1.0, [10])
        slow.succeed(10.0, [10])
    got = Counter([(await pool.acquire(None, None, 1)).url for _ in range(110)])
    assert got["http://slow"] == pytest.approx(10, abs=1)
    later = slow.answered + 61
    monkeypatch.setattr("rlrun.orchestrator.engines.pool.time.monotonic", lambda: later)
    assert slow.slowness(0.1) == 1.0, "one that was not asked for a minute may have recovered"


async def test_shared_prefix_stays_on_engine_until_overload() -> None:
    first, second = in_rotation(name="first"), in_rotation(name="second")
    pool = EnginePool([first, second], Signal())
    got = [await pool.acquire(first, None, 1) for _ in range(STICKY_SLACK + 2)]
    assert got[:-1] == [first] * (STICKY_SLACK + 1)
    assert got[-1] is second
    first.version = None
    assert await pool.acquire(first, None, 1) is second


async def test_engine_gets_no_request_during_weight_update() -> None:
    """Neither version would compute the first tokens completely."""
    first, second = in_rotation(name="first"), in_rotation(name="second")
    pool = EnginePool([first, second], Signal())
    first.updating = True
    assert [await pool.acquire(first, None, 1) for _ in range(3)] == [second] * 3
    first.updating = False
    assert await pool.acquire(first, None, 1) is first


async def test_concurrency_limit_admits_continued_episodes_before_new_ones() -> None:
    replica = in_rotation()
    pool = EnginePool([replica], Signal(), max_concurrency=2)
    assert [await pool.acquire(None, None, 1) for _ in range(2)] == [replica] * 2
    order: list[str] = []

    async def ask(name: str, *, first: bool) -> None:
        await pool.acquire(None, None, 1, first=first)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, first in (("head", False), ("new", False), ("goes on", True)):
            tasks.create_task(ask(name, first=first))
            await asyncio.sleep(0)
        given_up = tasks.create_task(ask("given up", first=True))
        await asyncio.sleep(0)
        assert (pool.waiting, pool.room(), order) == (4, 0, [])
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        pool.release(replica, 1)
        await eventually(lambda: bool(order))
        assert order == ["head"]
        pool.release(replica, 1)
        await eventually(lambda: len(order) == 2)
        pool.release(replica, 1)
    assert order == ["head", "goes on", "new"]
    assert (pool.waiting, replica.load) == (0, 2)


async def test_oversized_request_is_sent_to_idle_engine() -> None:
    replica = in_rotation()
    pool = EnginePool([replica], Signal(), max_concurrency=4)
    assert await pool.acquire(None, None, 16) is replica
    assert not replica.room(1)


@pytest.mark.parametrize("versions", [[2, 3], [3, 4], [0, 0]])
async def test_tokens_of_unexpected_version_are_requested_from_another_engine(versions: list[int]) -> None:
    liar = in_rotation(3, Scripted().script(versions), "liar")
    other = in_rotation(3, Scripted().script([3, 3]), "other")
    other.load = 1
    pool = EnginePool([liar, other], Signal())
    (completion,) = await Session(pool, SamplingConfig(), []).sample([1], max_tokens=4, n=1)
    assert completion.versions == [3, 3]
    assert (liar.version, liar.trusted, pool.lost.requests) == (None, False, 1)
    assert "changed its weights" in liar.failure


class Babbling(Scripted):
    """Engine that answers with fixed token ids of its current version."""

    ids: tuple[int, ...] = ()

    async def generate(self, token_ids: object, *, n: int, **_: object) -> list[Completion]:  # type: ignore[override]
        return [Completion(list(self.ids), [-1.0] * len(self.ids), [3] * len(self.ids), "stop")] * n


@pytest.mark.parametrize(("wrong", "limit"), [(100, 100), (2**31 - 1, 100), (-1, 100), (-1, None)])
async def test_unknown_token_ids_are_requested_from_another_engine(wrong: int, limit: int | None) -> None:
    bad, good = Babbling(), Babbling()
    bad.ids, good.ids = (7, wrong, 8), (7, 99, 0)
    first, second = in_rotation(3, bad, "first"), in_rotation(3, good, "second")
    second.load = 1
    pool = EnginePool([first, second], Signal(), token_limit=limit)
    (completion,) = await Session(pool, SamplingConfig(), []).sample([1], max_tokens=4, n=1)
    assert completion.token_ids == [7, 99, 0]
    assert (first.version, pool.lost.requests) == (None, 1)
    assert f"token id {wrong}" in first.failure


async def test_version_change_during_request_is_accepted() -> None:
    replica = in_rotation(3, Scripted().script([3, 4]))
    replica.handed = 4
    (completion,) = await Session(EnginePool([replica], Signal()), SamplingConfig(), []).sample([1], max_tokens=4, n=1)
    assert completion.versions == [3, 4]


async def test_rollout_ends_only_if_engine_rejects_the_request() -> None:
    errors = [EngineError("no route", 404), EngineError("wrong key", 401), EngineError("broken", 500)]
    for error in errors:
        bad, good = in_rotation(3, Scripted().script(error), "bad"), in_rotation(3, Scripted().script([3]), "good")
        good.load = 1
        assert await Session(EnginePool([bad, good], Signal()), SamplingConfig(), []).sample([1], max_tokens=4, n=1)
        assert bad.version is None
    bad = in_rotation(3, Scripted().script(EngineError("too long", 400)))
    with pytest.raises(EngineError, match="too long"):
        await Session(EnginePool([bad], Signal()), SamplingConfig(), []).sample([1], max_tokens=4, n=1)
    assert bad.version == 3


async def test_each_turn_gets_own_seed_on_any_engine() -> None:
    asked: list[object] = []

    class Seeded(Scripted):
        async def generate(self, token_ids: object, *, n: int, **more: Any) -> list[Completion]:  # type: ignore[override]
            asked.append(more["parameters"])
            return await super().generate(token_ids, n=n)

    bad = in_rotation(3, Seeded().script(EngineError("broken", 500)), "bad")
    good = in_rotation(3, Seeded().script([3], [3]), "good")
    good.load = 1
    session = Session(EnginePool([bad, good], Signal()), SamplingConfig(stop=["."]), [], seed=7)
    for _ in range(2):
        await session.sample([1], max_tokens=4, n=1)
    assert asked == [{"stop": ["."], "seed": seed} for seed in (7, 7, derived_seed(7, 1))]


async def test_engine_with_two_failures_gets_one_trial_request() -> None:
    replica = in_rotation()
    pool = EnginePool([replica], Signal())
    for rotation, pause in enumerate((0.2, 0.4, 0.8)):
        before = time.monotonic()
        pool.fail_request(replica, rotation, "broken")
        pool.fail_request(replica, rotation, "broken")  # same rotation: counted once
        assert before + pause <= replica.rest_until <= time.monotonic() + pause
        replica.version, replica.rotation = 3, rotation + 1
    assert replica.room(1)
    replica.load = 1
    assert not replica.room(1)
    replica.succeed(1.0, [1])
    assert replica.room(1)


async def test_retry_delay_stays_bounded_after_many_failures() -> None:
    """2.0**failures would overflow a float."""
    replica = in_rotation()
    replica.failures = 2000
    before = time.monotonic()
    EnginePool([replica], Signal()).fail_request(replica, replica.rotation, "broken")
    assert before + 15.0 <= replica.rest_until <= time.monotonic() + 15.0


async def test_unresponsive_engine_is_removed_and_its_requests_move() -> None:
    stuck, other = FakeEngine(lambda: 3600.0, version=3), Scripted(version=3).script([3])
    hung, good = in_rotation(3, stuck, "hung"), in_rotation(3, other, "good")
    good.load = 1
    pool, signal = EnginePool([], Signal()), Signal()
    pool.add(hung)
    pool.add(good)
    session = Session(pool, SamplingConfig(), [])
    asking = asyncio.create_task(session.sample([1], max_tokens=4, n=1))
    await eventually(lambda: stuck.running == 1)
    stuck.down = True  # for health checks
    monitor, misses = Monitor(pool, signal, Pace(answer=60)), 0
    for miss in range(1, MISSES):
        misses = await monitor.look(hung, misses)
        assert (misses, session.troubled, hung.version) == (miss, True, 3)
    await monitor.look(hung, misses)
    assert (await asking)[0].versions == [3]
    assert hung.version is None
    assert stuck.aborted == 1
    assert "health" in hung.failure


async def test_requests_move_from_engine_with_stuck_weight_update() -> None:
    stuck = FakeEngine(lambda: 3600.0, version=3, update_seconds=3600.0)
    hung, good = in_rotation(3, stuck, "hung"), in_rotation(3, Scripted(version=3).script([4]), "good")
    good.load = 1
    signal = Signal()
    pool = EnginePool([hung, good], signal)
    asking = asyncio.create_task(Session(pool, SamplingConfig(), []).sample([1], max_tokens=4, n=1))
    await eventually(lambda: stuck.running == 1)
    sync = WeightSync(pool, signal, timeout_seconds=0.05)
    sync.publish(4, "weights", hold=False)
    handing = asyncio.create_task(sync.run())
    async with asyncio.timeout(60):
        assert (await asking)[0].versions == [4]
    assert stuck.aborted == 1
    handing.cancel()
    await asyncio.gather(handing, return_exceptions=True)


class Receiving(FakeEngine):
    """Engine that receives weights from the trainer's memory, except the versions in `gone`."""

    gone: frozenset[int] = frozenset()

    async def receive_weights(self, trainer_url: str, version: int, *, force: bool = False) -> dict[str, float]:
        assert trainer_url == "http://trainer"
        if version in self.gone:
            raise EngineError("the trainer has it no more", 404)
        return await self.update_weights("sent", version, force=force)


async def test_version_deleted_by_trainer_is_skipped_even_for_evaluation() -> None:
    engine = Receiving()
    engine.gone = frozenset({1})
    signal = Signal()
    pool = EnginePool([Replica("http://a", engine)], signal)
    sync = WeightSync(pool, signal, timeout_seconds=5, sender="http://trainer")
    sync.publish(1, None, hold=True)
    sync.publish(2, None, hold=False)
    handing = asyncio.create_task(sync.run())
    await eventually(lambda: engine.held == [2])
    assert not sync.held(1)
    handing.cancel()
    await asyncio.gather(handing, return_exceptions=True)


async def test_restarted_engine_is_removed_before_its_next_request() -> None:
    replica = in_rotation(3, FakeEngine(version=1))
    pool = EnginePool([replica], Signal())
    await Monitor(pool, Signal()).look(replica)
    assert (replica.version, replica.trusted) == (None, False)
    assert replica.failure == "it holds version 1 instead of 3"


async def test_engine_without_metrics_has_no_adaptive_limit() -> None:
    replica = in_rotation(3, FakeEngine(version=3))
    pool = EnginePool([replica], Signal(), max_concurrency=64)
    replica.concurrency.observe(EngineMetrics(8, 20, 0.5), 28)
    assert pool.limited
    await Monitor(pool, Signal()).look(replica)
    assert (replica.concurrency.limit, pool.limited) == (64, False)


# ---- the controller


def test_preemptions_lower_limit_once_per_rest_period() -> None:
    control = Concurrency(256)
    control.observe(EngineMetrics(100, 0, 1.0, preemptions=10), 100)
    assert control.limit == 256, "what was before the first look is not news"
    for counter in (90, 95):
        control.observe(EngineMetrics(100, 0, 1.0, preemptions=counter), 100)
        assert control.limit == 90
    control.observe(EngineMetrics(90, 0, 1.0, preemptions=99), 90)
    control.observe(EngineMetrics(90, 0, 1.0, preemptions=2), 90)
    assert control.limit == 90, "a counter that falls is that of a new process"


def test_few_preemptions_lower_it_less() -> None:
    control = Concurrency(256)
    control.observe(EngineMetrics(100, 0, 1.0, preemptions=0), 100)
    control.observe(EngineMetrics(100, 0, 1.0, preemptions=28), 100)
    assert control.limit == 93
    for counter in (28, 28, 30):
        control.observe(EngineMetrics(93, 0, 1.0, preemptions=counter), 93)
    assert control.limit == 88, "5 % at least"


def test_long_queue_lowers_limit_to_running_requests() -> None:
    control = Concurrency(256)
    control.observe(EngineMetrics(64, 192, 0.5, preemptions=0), 256)
    assert control.limit == 64 + 8
    for _ in range(REST_LOOKS + 1):
        control.observe(EngineMetrics(60, 12, 0.95, preemptions=0), 72)
    assert control.limit == 60, "nobody waits for a place in the cache"


def test_limit_recovers_quickly_then_grows_slowly() -> None:
    control = Concurrency(256)
    control.observe(EngineMetrics(100, 0, 0.8, preemptions=0), 100)
    control.observe(EngineMetrics(100, 0, 0.8, preemptions=99), 100)
    seen = []
    for _ in range(REST_LOOKS + 30):
        control.observe(EngineMetrics(control.limit, 0, 0.8, preemptions=99), control.limit)
        seen.append(control.limit)
    grown = seen[REST_LOOKS:]
    assert grown[0] == 90 + 10 // 3
    assert 100 <= grown[9] <= 104
    assert grown[-1] == 256, "what was too high no longer is"


def test_foreign_requests_do_not_lower_limit() -> None:
    control = Concurrency(256)
    control.observe(EngineMetrics(64, 100, 0.5), 10)
    assert control.limit == 256


@settings(deadline=None)
@given(slots=st.integers(1, 300), kv=st.integers(1, 300), demand=st.integers(1, 600))
def test_limit_follows_changing_engine_capacity(slots: int, kv: int, demand: int) -> None:
    """The simulated engine has `slots` places and a cache for `kv` sequences, and preempts all others."""
    control, preemptions, flights = Concurrency(256), 0, []
    bears = min(slots, kv)
    for _ in range(120):
        load = min(control.limit, demand)
        running = min(load, bears)
        preemptions += max(0, min(load, slots) - kv)
        control.observe(EngineMetrics(running, load - running, min(1.0, load / kv), preemptions), load)
        flights.append(load)
        assert 1 <= control.limit <= 256
    settled = flights[-60:]
    assert max(settled) <= max(bears * 1.1 + 16 + 1, bears + 18), "at most one step above"
    assert sum(settled) / len(settled) >= 0.6 * min(bears, demand, 256)
    for _ in range(REST_LOOKS + 20):
        load = min(control.limit, 600)
        control.observe(EngineMetrics(load, 0, 0.1, preemptions), load)
    assert control.limit == 256


async def test_turn_of_cancelled_task_passes_to_next_task() -> None:
    turns, order = Turns(), []

    async def take(name: str) -> None:
        async with turns.mine(first=False):
            order.append(name)

    async with turns.mine(first=False):
        first, second = asyncio.create_task(take("first")), asyncio.create_task(take("second"))
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert order == ["second"]
    assert not turns.busy


async def test_rollout_fails_after_several_engines() -> None:
    replicas = [in_rotation(3, Scripted().script(EngineError("broken", 500)), f"{i}") for i in range(5)]
    with pytest.raises(EngineUnavailableError, match="5 tries failed"):
        await Session(EnginePool(replicas, Signal()), SamplingConfig(), []).sample([1], max_tokens=4, n=1)
