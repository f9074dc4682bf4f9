"""Load measurement of engines and draining of engines before their removal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_simulation import FakeEngine, eventually

from rlrun.config.models.rollout import SamplingConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.draining import Drain
from rlrun.orchestrator.engines.load_meter import LoadMeter
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.protocol.messages.lease_annotations import SpotWish


@dataclass
class Clock:
    """Clock that advances only on request."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """Engine pool with its load meter and drain."""

    engines: int = 2
    ahead: bool = False
    window: float | None = None
    wanted: int | None = None
    spot: SpotWish | None = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.pool = EnginePool([], Signal())
        for number in range(self.engines):
            self.add(number)
        self.meter = LoadMeter(self.pool, ahead=lambda: self.ahead, window=lambda: self.window, clock=self.clock)
        self.drain = Drain(self.pool, Signal(), wanted=lambda: self.wanted, spot=lambda: self.spot, clock=self.clock)

    def add(self, number: int, version: int | None = 3) -> Replica:
        replica = Replica(f"http://10.0.0.{number}:8000", FakeEngine(), version=version)
        self.pool.add(replica)
        return replica

    def step(self, *, loads: list[int], waited: float = 0.0, seconds: float = 10.0) -> None:
        """Simulate one step with a constant number of requests per engine."""
        for replica, load in zip(self.pool.in_use, loads, strict=True):
            replica.load = load
        for _ in range(10):
            self.meter.sample_load()
            self.clock.now += seconds / 10
        self.meter.trained({"time/wait_for_batch": waited})


def test_load_report_covers_only_complete_steps() -> None:
    world = World()
    world.step(loads=[9, 9])  # this step was in progress when the measurement started
    assert world.meter.report() is None
    world.pool.waiting = 4
    world.step(loads=[6, 2], waited=5.0)
    world.pool.waiting, world.ahead = 0, True
    world.step(loads=[4, 0], waited=1.0)
    report = world.meter.report()
    assert report is not None
    assert (report.engines, report.steps, report.seconds) == (2, 2, 20.0)
    assert report.waited == pytest.approx(0.3)
    assert (report.ahead, report.idle) == (pytest.approx(0.5, abs=0.06), pytest.approx(0.25, abs=0.03))
    assert report.busy == pytest.approx(0.75, abs=0.03)
    assert report.requests == pytest.approx((4 + 2) / 2, abs=0.2)
    assert report.waiting == pytest.approx(1.0, abs=0.2)


def test_changed_engine_count_restarts_load_measurement() -> None:
    world = World()
    for _ in range(3):
        world.step(loads=[1, 1])
    world.add(7)
    world.step(loads=[1, 1, 1])
    assert world.meter.report() is None, "that step began with two"
    world.step(loads=[1, 1, 1])
    report = world.meter.report()
    assert report is not None
    assert (report.engines, report.steps) == (3, 1)
    world.pool.replicas[0].version = None
    world.meter.sample_load()
    assert world.meter.report() is None


def test_load_window_covers_last_steps_of_requested_length() -> None:
    world = World(engines=1, window=25.0)
    for step in range(8):
        world.step(loads=[1], waited=float(step))
    report = world.meter.report()
    assert report is not None
    assert (report.steps, report.waited) == (3, pytest.approx((5 + 6 + 7) / 30))
    world.window = 5.0
    report = world.meter.report()
    assert report is not None
    assert report.steps == 2, "never of one step alone"


def test_drain_selects_engine_with_fewest_requests() -> None:
    world = World(engines=3, wanted=2)
    for replica, load in zip(world.pool.replicas, (5, 1, 3), strict=True):
        replica.load = load
    world.drain.adjust_drains()
    going = world.pool.replicas[1]
    assert [replica.draining for replica in world.pool.replicas] == [False, True, False]
    assert going not in world.pool.candidates()
    assert world.drain.drained() == ()
    going.load = 0
    assert world.drain.drained() == ("10.0.0.1",)
    world.pool.remove(going, "it is no longer an address")
    world.drain.adjust_drains()
    assert (world.drain.drained(), any(replica.draining for replica in world.pool.replicas)) == ((), False)


def test_drain_prefers_unused_engines_then_newest() -> None:
    world = World(engines=3, wanted=2)
    world.drain.adjust_drains()
    assert world.drain.drained() == ("10.0.0.2",)
    world = World(engines=2, wanted=2)
    world.add(8, version=None)
    world.add(9)
    world.wanted = 3
    world.drain.adjust_drains()
    assert world.drain.drained() == ("10.0.0.8",)


def test_spot_and_other_engines_drain_to_separate_targets() -> None:
    world = World(engines=5, wanted=3, spot=SpotWish.read("2 10.0.0.0 10.0.0.1 10.0.0.9"))
    for replica, load in zip(world.pool.replicas, (0, 0, 7, 5, 6), strict=True):
        replica.load = load
    world.drain.adjust_drains()
    assert [replica.draining for replica in world.pool.replicas] == [False, False, False, True, True]
    world.wanted, world.spot = 3, SpotWish.read("0 10.0.0.0 10.0.0.1")
    world.drain.adjust_drains()
    assert [replica.draining for replica in world.pool.replicas] == [True, True, False, False, False]
    world.wanted, world.spot = 1, SpotWish.read("1 10.0.0.9")  # these engines do not exist
    world.drain.adjust_drains()
    assert [replica.draining for replica in world.pool.replicas].count(False) == 1, "the last one stays in use"


def test_drain_stops_if_another_pod_was_removed() -> None:
    world = World(engines=3, wanted=2)
    world.drain.adjust_drains()
    world.pool.remove(world.pool.replicas[0], "the Deployment took another one")
    world.drain.adjust_drains()
    assert [replica.open for replica in world.pool.replicas] == [True, True]
    world.wanted = 1
    world.drain.adjust_drains()
    world.wanted = None
    world.drain.adjust_drains()
    assert [replica.open for replica in world.pool.replicas] == [True, True]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["engine", "starting"]), min_size=1, max_size=8), st.integers(-1, 10))
def test_drain_leaves_at_least_one_usable_engine(kinds: list[str], wanted: int) -> None:
    world = World(engines=0, wanted=wanted)
    for number, kind in enumerate(kinds):
        world.add(number, version=3 if kind == "engine" else None)
    world.drain.adjust_drains()
    draining = [replica for replica in world.pool.replicas if replica.draining]
    assert len(draining) <= max(0, len(kinds) - max(1, wanted))
    assert bool(world.pool.in_use) == ("engine" in kinds)


async def test_unfinished_requests_of_drained_engine_move_to_another() -> None:
    world = World(engines=2, wanted=None)
    slow, quick = world.pool.replicas
    slow.client = FakeEngine(lambda: 3600.0, version=3)
    quick.client = FakeEngine(version=3)
    slow.handed = quick.handed = 3
    session = Session(world.pool, SamplingConfig(), [2])
    session._replica = slow
    asking = asyncio.ensure_future(session([1, 2, 3], max_tokens=8))
    await eventually(lambda: slow.load == 1)
    quick.load = 5
    world.wanted = 1
    world.drain.adjust_drains()
    assert (slow.draining, world.drain.drained()) == (True, ())
    world.clock.now += 299
    world.drain.adjust_drains()
    assert not asking.done()
    world.clock.now += 1
    world.drain.adjust_drains()
    assert (await asking).token_ids
    assert world.drain.drained() == ("10.0.0.0",)
    assert world.pool.lost.requests == 1
