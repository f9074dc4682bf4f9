"""Random lives of a run: what finishes, is packed, trained, saved and killed in any order, on the real files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_journal_world import GROUP, STEPS, World, without_flushes

Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from(["dispatch"] * 4 + ["finish"] * 6 + ["pack"] * 2 + ["train", "save", "crash"]), st.integers(0, 999)
)


def live(world: World, actions: Sequence[Action]) -> None:
    """Let these things happen, where they can."""
    for action, choice in actions:
        match action:
            case "finish":
                world.finish(choice)
            case "crash":
                crash(world, choice / 999)
            case _:
                getattr(world, action)()


def crash(world: World, torn: float) -> None:
    """Kill all; where no version is lost, the next attempt knows all that the killed one did."""
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
    assert world.back.refused.total() == 0


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=150), depth=st.integers(0, 2), slack=st.integers(0, 6))
def test_nothing_is_lost_or_trained_twice_or_generated_twice(actions: list[Action], depth: int, slack: int) -> None:
    with TemporaryDirectory() as folder, without_flushes():
        world = World(Path(folder), depth, depth + slack)
        live(world, actions)  # the world itself refuses to generate what is there
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
def test_a_run_that_is_killed_with_no_version_lost_trains_what_the_undisturbed_one_does(
    actions: list[Action], torn: list[float]
) -> None:
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


@pytest.mark.parametrize("segment_bytes", [1, 1500, 1 << 20])
def test_the_journal_is_deleted_as_checkpoints_cover_it(tmp_path: Path, segment_bytes: int) -> None:
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
