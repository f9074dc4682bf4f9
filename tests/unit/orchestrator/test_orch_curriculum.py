"""Curricula: task pools, the difficulty filter, warm-up and the sample order after a restart."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlrun.config.models.learning import AdvantageConfig, FilterConfig
from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.groups.filters import Rules, reason_to_drop
from rlrun.orchestrator.journal.ledger import Ledger, LedgerState
from rlrun.orchestrator.staleness import accepted_at_step, dispatch_capacity
from rlrun.orchestrator.tasks.curriculum import TaskPools, pool_of
from rlrun.orchestrator.tasks.sampler import Draw, Sampler, Source
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol.files.batch import Batch, Dropped


def curriculum(**changes: Any) -> CurriculumConfig:
    return CurriculumConfig.model_validate(changes)


POOLS: dict[str, Any] = {"easy": {"threshold": 0.75, "fraction": 0.25}, "hard": {"threshold": 0.25, "fraction": 0.25}}


def test_task_moves_to_pool_of_its_latest_group_reward() -> None:
    config = curriculum(**POOLS)
    assert [pool_of(mean, config) for mean in (0.0, 0.25, 0.5, 0.75, 1.0)] == ["hard", "hard", None, "easy", "easy"]
    pools = TaskPools(config, 10, "key")
    pools.draw(1)
    pools.observe(3, 0.9)
    pools.observe(4, 0.1)
    assert pools.sizes() == {"easy": 1, "normal": 8, "hard": 1}
    pools.observe(3, 0.1)
    pools.observe(4, 0.5)
    assert pools.sizes() == {"easy": 0, "normal": 9, "hard": 1}


def test_pool_fractions_set_share_of_draws() -> None:
    pools = TaskPools(curriculum(**POOLS), 20, "key")
    for task in (1, 2, 3):
        pools.observe(task, 1.0)
    pools.observe(7, 0.0)
    drawn = [pools.draw(1)[0] for _ in range(64)]
    counts = Counter(drawn)
    assert [counts[task] for task in (1, 2, 3)] == [6, 5, 5]  # a quarter of 64, in turns
    assert counts[7] == 16
    walked = [task for task in drawn if task not in (1, 2, 3, 7)]
    assert sorted(walked[:16]) == sorted(set(range(20)) - {1, 2, 3, 7})
    assert len(walked) == 32


def test_pool_without_fraction_is_drawn_only_after_normal_tasks() -> None:
    pools = TaskPools(curriculum(easy={"threshold": 1}, hard={"threshold": 0}), 4, "key")
    pools.observe(0, 1.0)
    pools.observe(1, 0.0)
    assert {pools.draw(1)[0] for _ in range(20)} == {2, 3}
    pools.observe(2, 0.0)
    pools.observe(3, 1.0)
    assert [pools.draw(1)[0] for _ in range(4)] == [1, 2, 1, 2]  # the hard ones before the easy ones
    pools.observe(1, 1.0)
    pools.observe(2, 1.0)
    assert [pools.draw(1)[0] for _ in range(4)] == [0, 3, 1, 2]


def test_draw_uses_excluded_pool_after_thousand_skipped_tasks() -> None:
    pools = TaskPools(curriculum(shuffle=False, hard={"threshold": 0}), 5000, "key")
    for task in range(4000):
        pools.observe(task, 0.0)
    found = [pools.draw(1)[0] for _ in range(5)]
    assert found == [0, 1, 2, 3, 4000]  # each draw skips at most 1,000 tasks


def test_unshuffled_curriculum_keeps_task_order() -> None:
    pools = TaskPools(curriculum(shuffle=False), 3, "key")
    assert [pools.draw(1) for _ in range(7)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_warmup_opens_tasks_in_order(shuffle: bool) -> None:
    pools = TaskPools(curriculum(warmup_steps=4, shuffle=shuffle), 10, "key")
    for step, window in ((1, 3), (2, 5), (3, 8), (4, 10), (9, 10)):
        assert {pools.draw(step)[0] for _ in range(2 * window)} == set(range(window))
        assert pools.sizes()["normal"] == window


def test_warmup_restart_of_walk_repeats_no_task_in_epoch() -> None:
    pools = TaskPools(curriculum(warmup_steps=4, shuffle=True), 10, "key")
    drawn = [pools.draw(step) for step in (1, 1, 2, 2, 2, 3, 3, *[4] * 25)]
    epochs = [epoch for _, epoch in drawn]
    assert epochs == sorted(epochs)
    assert len(set(drawn)) == len(drawn)


def test_curriculum_without_observed_rewards_keeps_plain_sample_order() -> None:
    plain = Sampler(5, [Source("a", 7), Source("b", 5, 2.0)])
    pooled = Sampler(5, [Source("a", 7, curriculum=curriculum(**POOLS)), Source("b", 5, 2.0)])
    assert [pooled.draw(group) for group in range(60)] == [plain.draw(group) for group in range(60)]
    assert plain.state() == {}


def test_group_draw_uses_only_batches_certain_to_be_complete() -> None:
    config = curriculum(shuffle=False, easy={"threshold": 1})
    sampler = Sampler(0, [Source("a", 4, group_size=2, curriculum=config)], batch_size=4, max_async_level=1)
    assert [sampler.draw(group).task for group in range(4)] == [0, 1, 2, 3]  # for steps 1 and 2
    sampler.accept(1, {0: 1.0, 1: 0.5})
    sampler.accept(2, {2: 1.0, 3: 1.0})
    assert [sampler.draw(group).task for group in (4, 5)] == [1, 2]  # for step 3, which sees batch 1
    assert [sampler.draw(group).task for group in (6, 7)] == [1, 1]  # for step 4, which sees batch 2
    assert sampler.metrics() == {"pools/a/easy": 3.0, "pools/a/normal": 1.0, "pools/a/hard": 0.0}


def test_order_of_finished_groups_does_not_change_draws() -> None:
    config = curriculum(hard={"threshold": 0, "fraction": 0.5})
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        sampler = Sampler(0, [Source("a", 9, curriculum=config)], batch_size=4)
        sampler.draw(3)
        sampler.accept(1, dict.fromkeys(order, 0.0))
        found.append([sampler.draw(group) for group in range(4, 12)])
    assert found[0] == found[1]


def test_replacement_of_dropped_group_targets_the_same_step() -> None:
    config = curriculum(shuffle=False, warmup_steps=2)
    sampler = Sampler(0, [Source("a", 4, curriculum=config)], batch_size=4)
    assert [sampler.draw(group).task for group in range(4)] == [0, 1, 0, 1]
    sampler.drop(1, 2, 0.0)
    assert [sampler.draw(group).task for group in (4, 5)] == [0, 1]  # one for step 1, one for step 2
    assert [sampler.draw(group).task for group in (6, 7)] == [2, 3]


def test_rewards_of_batches_with_other_tasks_are_ignored() -> None:
    config = curriculum(shuffle=False, hard={"threshold": 0})
    found = []
    for tasks in (((2, 2), (3, 3)), ((2, 2), (3, 0))):
        sampler = Sampler(0, [Source("a", 9, curriculum=config)], batch_size=2)
        dropped = (Dropped(0, "too_hard", 0.0, 2), Dropped(1, "error", None, 3))
        sampler.readmit(Batch(1, 1, (), dropped=dropped, tasks=tasks), {2: 0.5, 3: 0.0})
        sampler.draw(4)
        found.append(sampler.metrics()["pools/a/hard"])
    assert found == [2.0, 1.0]


def test_changed_environments_start_with_empty_pools() -> None:
    config = curriculum(easy={"threshold": 1})
    old = Sampler(0, [Source("a", 4, curriculum=config)], batch_size=2)
    old.draw(5)
    new = Sampler(0, [Source("a", 9, curriculum=config)], batch_size=2)
    assert not new.restore(old.state(), step=2, next_group=6)
    assert 0 <= new.draw(3).task < 9  # an open group of the previous attempt
    assert len({new.draw(group).task for group in range(6, 14)}) == 8
    assert new.restore({}, step=0, next_group=0)
    assert Sampler(0, [Source("a", 9)]).restore({}, step=3, next_group=7)


def group(*rewards: float) -> FinishedGroup:
    return FinishedGroup(0, "a", "t", 0, 1.0, tuple(Rollout((), reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "reason"), [((1, 0.9), "too_easy"), ((0, 0), "too_hard"), ((1, 0), None), ((0.5, 0.5), "zero_variance")]
)
def test_difficulty_filter_drops_groups_of_untrained_pools(rewards: tuple[float, ...], reason: str | None) -> None:
    config = curriculum(easy={"threshold": 0.9, "train": False}, hard={"threshold": 0, "train": False})
    rules = Rules(AdvantageConfig(name="grpo"), FilterConfig(zero_variance=True), 10, 100, config)
    trained = Rules(AdvantageConfig(name="grpo"), FilterConfig(zero_variance=True), 10, 100, curriculum(**POOLS))
    assert reason_to_drop(group(*rewards), rules) == reason
    assert reason_to_drop(group(1, 0.9), trained) is None


def test_pools_that_overlap_are_refused() -> None:
    with pytest.raises(ValidationError) as error:
        curriculum(easy={"threshold": 0.5}, hard={"threshold": 0.5})
    assert "hard.threshold (0.5) must be below easy.threshold (0.5); lower it" in str(error.value)


@dataclass
class World:
    """Ledger and sampler driven as the pipeline drives them, in simulated time. `kill` restores the state of the last batch."""

    sources: list[Source]
    k: int
    rng: random.Random
    in_order: bool
    """Whether groups finish in the order of their numbers."""
    drawn: dict[int, Draw] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    batch_size: int = 6

    def __post_init__(self) -> None:
        self.ledger, self.sampler = Ledger(), self.new_sampler()
        self.version, self.now = 0, 0.0
        self.running: list[tuple[float, int]] = []
        self.buffer: list[int] = []
        self.saved = self.snapshot()

    def new_sampler(self) -> Sampler:
        return Sampler(1, self.sources, batch_size=self.batch_size, max_async_level=self.k)

    def snapshot(self) -> str:
        return json.dumps([self.ledger.state().__dict__, self.sampler.state()])

    def size(self, group: int) -> int:
        return self.sources[self.drawn[group].environment].group_size

    def mean(self, group: int) -> float:
        """Return the mean reward of the policy for a task at a step."""
        draw = self.drawn[group]
        return random.Random(f"{draw}/{group // 9}").choice([0.0, 0.25, 0.5, 0.75, 1.0])

    def kill(self) -> None:
        ledger, sampler = json.loads(self.saved)
        state = LedgerState(ledger["next_group"], tuple(ledger["open_groups"]), ledger["counters"])
        self.ledger, self.sampler = Ledger.restore(state), self.new_sampler()
        assert self.sampler.restore(sampler, step=len(self.batches), next_group=state.next_group)
        assert self.snapshot() == self.saved
        self.running, self.buffer, self.version = [], [], len(self.batches)

    def advance(self) -> None:
        """Dispatch all groups that may be dispatched, then finish the next group."""
        while self.room() > 0:
            number = self.ledger.take()
            draw = self.sampler.draw(number)
            assert self.drawn.setdefault(number, draw) == draw
            seconds = 1.0 if self.in_order else self.rng.expovariate(1)
            heapq.heappush(self.running, (self.now + seconds, number))
        if not self.running or self.rng.random() < 0.2:
            self.version = min(self.version + 1, len(self.batches))
            return
        self.now, number = heapq.heappop(self.running)
        made, mean = len(self.batches), self.mean(number)
        pool = pool_of(mean, config) if (config := self.sources[self.drawn[number].environment].curriculum) else None
        if pool and config and not getattr(config, pool).train:
            self.ledger.drop(number, f"too_{pool}")
            self.sampler.drop(made + 1, number, mean)
            return
        self.buffer.append(number)
        if sum(map(self.size, self.buffer)) >= self.batch_size:
            self.ledger.accept(self.buffer)
            self.sampler.accept(made + 1, {number: self.mean(number) for number in self.buffer})
            self.batches.append(sorted(self.buffer))
            self.buffer = []
            self.saved = self.snapshot()

    def room(self) -> int:
        running = sum(self.size(number) for _, number in self.running)
        accepted = accepted_at_step(len(self.batches), self.batch_size) + sum(map(self.size, self.buffer))
        return dispatch_capacity(
            concurrency=1000,
            running=running,
            max_async_level=self.k,
            version=self.version,
            batch_size=self.batch_size,
            accepted=accepted,
        )


def run(world: World, steps: int, kills: float) -> World:
    while len(world.batches) < steps:
        world.advance()
        if world.rng.random() < kills:
            world.kill()
    return world


fractions = st.sampled_from([0.0, 0.1, 0.5])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.booleans(), st.integers(0, 8), fractions, fractions, st.booleans(), st.integers(0, 2**32))
def test_randomly_killed_runs_draw_the_same_tasks(
    k: int, shuffle: bool, warmup: int, easy: float, hard: float, train: bool, seed: int
) -> None:
    # With several steps in flight, the finish order decides which groups a batch contains and when groups are dropped.
    train = train or k > 0
    config = curriculum(
        shuffle=shuffle,
        warmup_steps=warmup,
        easy={"threshold": 0.75, "fraction": easy, "train": train},
        hard={"threshold": 0.0, "fraction": hard, "train": train},
    )
    sources = [Source("a", 11, 2.0, 2, config), Source("b", 5, 1.0, 2), Source("c", 7, 1.0, 2, curriculum(**POOLS))]
    worlds = [
        run(World(sources, k, random.Random(seed + number), in_order=k > 0), 12, kills)
        for number, kills in enumerate((0.0, 0.1, 0.05))
    ]
    for world in worlds[1:]:
        assert world.batches == worlds[0].batches
        for number in {n for batch in world.batches for n in batch}:
            assert world.drawn[number] == worlds[0].drawn[number]
