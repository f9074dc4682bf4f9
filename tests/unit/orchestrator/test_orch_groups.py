"""State machine of groups: each group has exactly one state, and only withdrawn groups are cancelled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orch_journal_world import a_rollout
from orch_simulation import make_config

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.groups.filters import rules_of
from rlrun.orchestrator.groups.groups import Flight, Groups
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.types import FinishedGroup

GROUP = 2
CONFIG, WITH_SURPLUS = (
    make_config(
        Path("run"),
        Path("model"),
        batch_size=2 * GROUP,
        oversampling_factor=factor,
        algorithm={"max_async_level": 1, "max_off_policy_steps": 2, "filters": {"zero_variance": True}},
    )
    for factor in (1.0, 1.5)
)

Action = tuple[Literal["take", "finish", "engine", "error", "cancel", "batch"], int]
ACTIONS = st.tuples(
    st.sampled_from(["take"] * 4 + ["finish"] * 4 + ["batch"] * 2 + ["engine", "error", "cancel"]), st.integers(0, 99)
)


def make_groups(config: OrchestratorConfig = CONFIG) -> Groups:
    return Groups(
        config,
        made=0,
        ledger=Ledger(),
        sampler=Sampler.from_config(config, [100]),
        rules=rules_of(config, vocabulary=100),
        journal=None,
        signal=Signal(),
    )


def finished(flight: Flight, *, equal: bool = False) -> FinishedGroup:
    rollouts = tuple(a_rollout([flight.version], float(equal or member)) for member in range(GROUP))
    label = CONFIG.environments[0].label
    return FinishedGroup(flight.number, label, "t", flight.version, 1.0, rollouts)


class Life:
    """Both pipeline loops, driven by hand. After each action, each group must have exactly one state."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self.groups = make_groups(config)
        self.batched: list[int] = []
        self.dropped: list[int] = []

    def act(self, action: Action) -> None:
        """Run the action if it is possible in the current state."""
        groups, (what, choice) = self.groups, action
        if what == "take":
            groups.take(groups.made)
        elif what == "batch":
            step, chosen = groups.made + 1, groups.finished[:2]
            if len(chosen) == 2 and not groups.waits_for(step):
                made = groups.batch(chosen)
                assert made.step == step
                self.batched += [number for number, _ in made.tasks]
                self.dropped += [dropped.group for dropped in made.dropped]
        elif groups.in_flight:
            flights = [flight for _, flight in sorted(groups.in_flight.items())]
            flight = flights[
                -1 - choice % (2 if what == "finish" and len(flights) > 1 else len(flights))
            ]  # others grow old
            withdrawn = flight.expired or flight.surplus
            if what == "finish":
                groups.end(flight, finished(flight, equal=choice % 5 == 0))
            elif what == "cancel" and withdrawn:
                groups.end(flight, None)
            elif what in ("engine", "error"):
                groups.end(flight, "engine" if what == "engine" else "error")

    def check(self) -> None:
        """Check that each group has exactly one state."""
        groups = self.groups
        now = groups.ledger.state()
        out = [*groups.in_flight, *(group.number for group in groups.finished)]
        over = [*self.batched, *self.dropped, *(dropped.group for dropped in groups._dropped)]
        assert max(Counter([*out, *over]).values(), default=1) == 1
        assert set(out) <= set(now.open_groups)
        assert set(over) == set(range(now.next_group)) - set(now.open_groups)
        again = set(now.open_groups) - set(out)
        assert {groups.ledger.take() for _ in again} == again, "what is open and not out waits"
        for number in again:
            groups.ledger.dispatch_again(number, "looked at")


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=20, max_size=120), surplus=st.booleans())
def test_group_has_exactly_one_state(actions: list[Action], surplus: bool) -> None:
    life = Life(WITH_SURPLUS if surplus else CONFIG)
    for action in actions:
        life.act(action)
        life.check()
        withdrawn = {flight.number for flight in life.groups.withdrawn}
        marked = {f.number for f in life.groups.in_flight.values() if f.expired or f.surplus}
        assert marked <= withdrawn, "the dispatcher cancels what is marked"


async def test_finished_members_survive_engine_loss() -> None:
    groups = make_groups()
    flight = groups.take(0)
    await groups.keep(flight, 1, a_rollout([0], 1.0), temperature=1.0)
    groups.end(flight, "engine")
    again = groups.take(1)
    assert (again.number, again.version, list(again.members)) == (flight.number, 0, [1])


@pytest.mark.parametrize("version", [0, 1])
async def test_stale_members_are_replayed_after_engine_loss(version: int) -> None:
    groups = make_groups()
    flight = groups.take(version)
    await groups.keep(flight, 1, a_rollout([version], 1.0), temperature=1.0)
    groups.end(flight, "engine")
    groups.advance(3)  # step 4 trains on groups that were dispatched at version 1 or later
    again = groups.take(3)
    assert again.number == flight.number
    assert (again.version, list(again.members)) == ((1, [1]) if version else (3, []))
    assert groups.ledger.counters["discarded/age"] == (0 if version else 1)


def test_group_replayed_for_age_is_awaited_by_next_step() -> None:
    groups = make_groups()
    slow, *quick = [groups.take(0) for _ in range(7)]
    for flight in quick:
        groups.end(flight, finished(flight))
    for _ in range(3):
        groups.batch(groups.finished[:2])
    assert list(groups.withdrawn) == [slow]
    assert slow.expired, "step 4 trains on what was dispatched at version 1 or later"
    groups.end(slow, finished(slow))
    assert not groups.finished
    again = groups.take(3)
    assert again.number == slow.number
    assert [groups.waits_for(step) for step in (4, 5, 6)] == [False, False, True]


def test_late_group_counts_until_its_batch_is_trained() -> None:
    groups = make_groups(WITH_SURPLUS)
    flights = [groups.take(0) for _ in range(3)]
    for flight in flights[:2]:
        groups.end(flight, finished(flight))
    groups.batch(groups.finished)
    assert not flights[2].surplus, "the pipeline is one step deep: the next batch can have it"
    more = [groups.take(0) for _ in range(2)]
    groups.end(more[0], finished(more[0]))
    groups.end(flights[2], finished(flights[2]))
    groups.batch(groups.finished)
    assert more[1].surplus
    groups.end(more[1], finished(more[1]))
    assert [group.number for group in groups.finished] == [more[1].number]
