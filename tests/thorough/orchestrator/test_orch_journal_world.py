"""Random run histories: finish, pack, train, save and kill in any order, with real files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_journal_world import GROUP, STEPS, World, at_once, without_flushes

from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.journal.frames import DroppedEntry
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import Found, readmit_entries
from rlrun.orchestrator.tasks.sampler import Sampler, Source

Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from(["dispatch"] * 4 + ["finish"] * 6 + ["pack", "train"] * 2 + ["save", "crash"]), st.integers(0, 999)
)


def live(world: World, actions: Sequence[Action]) -> None:
    """Apply the actions if they are possible."""
    for action, choice in actions:
        match action:
            case "finish":
                world.finish(choice)
            case "crash":
                crash(world, choice / 999)
            case _:
                getattr(world, action)()


def crash(world: World, torn: float) -> None:
    """Kill all roles; if no version is lost, the next attempt has the complete state of the killed one."""
    numbers = [group.number for group in world.buffer]
    under_way = {number: set(flight.members) for number, flight in (world.flights | world.unfinished).items()}
    dropped, step, version = [d.group for d in world.dropped], world.step, world.version
    world.crash(torn)
    if world.attempt.base_step < version:
        return
    assert world.step == step
    assert [group.number for group in world.buffer] == numbers
    assert [d.group for d in world.dropped] == dropped
    began = {number: members for number, members in under_way.items() if members}
    found = {number: set(flight.members) for number, flight in world.unfinished.items()}
    for number, members in began.items():
        assert found[number] >= members


@settings(max_examples=30, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=60, max_size=150), depth=st.integers(0, 2), slack=st.integers(0, 6))
def test_groups_are_trained_and_generated_exactly_once(actions: list[Action], depth: int, slack: int) -> None:
    with TemporaryDirectory() as folder, without_flushes():
        world = World(Path(folder), depth, depth + slack)
        live(world, actions)  # the world refuses to generate existing rollouts
        world.to_the_end()
        trained = [g for _, batch in sorted(world.trained.items()) for g in {s.group for s in batch.samples}]
        assert sorted(world.trained) == list(range(1, STEPS + 1))
        assert len(trained) == len(set(trained))
        state = world.ledger.state()
        unsettled = set(state.open_groups)
        assert unsettled.isdisjoint(trained)
        assert state.counters["accepted"] == len(trained)
        given_up = sum(count for name, count in state.counters.items() if name.startswith("dropped/"))
        assert given_up + len(trained) + len(unsettled) == state.next_group, "a group is skipped or counted twice"


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(ACTIONS.filter(lambda a: a[0] != "crash"), max_size=60),
    torn=st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_killed_run_without_lost_version_equals_undisturbed_run(actions: list[Action], torn: list[float]) -> None:
    with TemporaryDirectory() as folder, without_flushes():
        worlds = [World(Path(folder) / name, 1, 20) for name in ("whole", "killed")]
        for world in worlds:
            live(world, actions)
            world.save()
        whole, killed = worlds
        for share in torn:
            crash(killed, share)
        assert killed.attempt.base_step == whole.version
        in_flight = sorted(whole.flights)
        assert [killed.ledger.take() for _ in in_flight] == in_flight
        for number in in_flight:
            assert killed.sampler.draw(number) == whole.sampler.draw(number)
        ahead = range(whole.ledger.next_group, whole.ledger.next_group + 10)
        assert [killed.sampler.draw(n) for n in ahead] == [whole.sampler.draw(n) for n in ahead]


def advance_until(world: World, condition: Callable[[], bool]) -> None:
    """Apply possible actions until the condition holds; new groups come before old members, so that many groups are
    unfinished.
    """
    for choice in range(500):
        if condition():
            return
        _ = world.train() or world.pack() or (choice % 2 and world.dispatch()) or world.finish(choice)
    raise AssertionError("it never is")


def test_rollouts_of_lost_versions_are_refused_and_counted_once(tmp_path: Path) -> None:
    with without_flushes():
        world = World(tmp_path, 2, 8)
        advance_until(world, lambda: world.version == 2)
        newest = {member: made[-1].newest_version for member, made in world.made.items()}
        world.crash(0.5)
        lost = {member for member, version in newest.items() if version > 0}
        assert world.back.refused == Counter(version=len(lost))
        assert lost
        world.to_the_end()
        world.save()
        world.crash(0.5)
        assert world.back.refused.total() == 0, "what the attempt before has told is not told again"


def test_rollouts_too_old_for_the_next_step_are_refused(tmp_path: Path) -> None:
    with without_flushes():
        world = World(tmp_path, 0, 1)
        assert world.dispatch()
        assert world.dispatch()
        straggler = min(world.flights)
        assert world.finish(0)  # the straggler still lacks one member, and other groups fill the batches
        flight = world.flights.pop(straggler)
        advance_until(world, lambda: world.version == 2 and not world.buffer)
        assert world.save()
        world.flights[straggler] = flight
        world.crash(0.0)
        assert world.back.refused["age"] == 1
        assert straggler not in world.unfinished


def test_dropped_group_restores_the_number_of_draws() -> None:
    def new() -> Sampler:
        source = Source("pooled", 100, group_size=GROUP, curriculum=CurriculumConfig(warmup_steps=10))
        return Sampler(3, [source], batch_size=2 * GROUP)

    whole, again = new(), new()
    for group in range(4):
        whole.draw(group)
    whole.drop(1, 0, None)
    at_once(
        readmit_entries,
        Found([DroppedEntry(0, "error", None, next_group=4, newest_version=0)]),
        is_old=lambda version: False,
        ledger=Ledger(),
        sampler=again,
        environments=[("pooled", GROUP)],
        finish=lambda group: None,
        drop=lambda entry: again.drop(1, entry.group, entry.mean_reward),
    )
    assert [again.draw(group) for group in range(4, 12)] == [whole.draw(group) for group in range(4, 12)]


@pytest.mark.parametrize("segment_bytes", [1, 1500, 1 << 20])
def test_journal_is_deleted_when_checkpoints_cover_it(tmp_path: Path, segment_bytes: int) -> None:
    with without_flushes():
        world = World(tmp_path, 1, 8, segment_bytes)
        most = 0
        while world.version < STEPS:
            _ = world.train() or world.pack() or world.finish(0) or world.dispatch()
            most = max(most, len(world.paths.journal_on_disk()))
            if world.version in world.snapshots and world.version > 0:
                world.save()
        assert most > 0
        open_rollouts = GROUP * (len(world.buffer) + len(world.flights))
        assert len(world.paths.journal_on_disk()) <= open_rollouts
