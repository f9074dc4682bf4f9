"""Bounded work per turn of the event loop, independent of rollouts in flight, batch size and recovered rollouts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from orch_simulation import eventually, make_config, simulate

from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.batches.assemble import choose_groups
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.evaluation import evaluation_schedule
from rlrun.orchestrator.evaluation.evaluator import Answer, Evaluator, Question
from rlrun.orchestrator.groups.groups import Flight, Groups
from rlrun.orchestrator.journal import recovery
from rlrun.orchestrator.journal.frames import Entry, RolloutEntry
from rlrun.orchestrator.journal.journal_writer import GroupCommit
from rlrun.orchestrator.journal.ledger import Ledger, LedgerState
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.rollouts.dispatcher import Dispatcher
from rlrun.orchestrator.tasks.sampler import Sampler, Source
from rlrun.orchestrator.types import Recorded, Rollout
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes
from rlrun.runtime.background_compute import run_stepwise

MANY = 256
A_TURN = 32
"""Largest number of items in one turn of the loop."""


class Turns:
    """Counter of events in each turn of the event loop."""

    def __init__(self) -> None:
        self.most = self.total = 0
        self._now = 0

    def __call__(self) -> None:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._over)
        self._now += 1
        self.total += 1
        self.most = max(self.most, self._now)

    def _over(self) -> None:
        self._now = 0


def a_rollout(tokens: int = 2) -> Rollout:
    ones = np.ones(tokens, np.int32)
    columns = Recorded(ones, ones.astype(np.bool_), -ones.astype(np.float32), np.zeros(tokens, np.int32))
    return Rollout((columns,), 1.0)


async def test_evaluation_questions_start_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, evaluator = Turns(), Evaluator(None, [], None, None, None)  # type: ignore[arg-type]

    async def answered(arena: Any, task: Any, sample: int, version: int) -> Answer:
        turns()
        return Answer("e", str(task), sample, None)

    monkeypatch.setattr(evaluator, "_answer_question", answered)
    arena: Any = SimpleNamespace(environment=SimpleNamespace(compares=False))
    asked = [Question(arena, number, 0) for number in range(MANY)]  # type: ignore[arg-type]
    assert len(await evaluator.collect_answers(asked, 0)) == turns.total == MANY
    assert turns.most <= A_TURN


@pytest.mark.parametrize("surplus", [False, True])
async def test_groups_are_cancelled_in_several_turns(tmp_path: Path, tokenizer_folder: Path, surplus: bool) -> None:
    config, turns = make_config(tmp_path, tokenizer_folder, oversampling_factor=2.0, max_steps=200), Turns()
    signal = Signal()
    groups = Groups(config, made=99, ledger=Ledger(), sampler=Sampler(0, []), rules={}, journal=None, signal=signal)
    nothing: Any = None
    context = RunContext(config, nothing, [], nothing, EnginePool([], signal), nothing, signal, nothing)
    dispatcher = Dispatcher(context, groups, nothing)

    async def fly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            turns()

    running = asyncio.create_task(dispatcher.run())
    flights = [Flight(number, 0, 1, 0.0, task=asyncio.create_task(fly())) for number in range(MANY)]
    groups.in_flight |= {flight.number: flight for flight in flights}
    await asyncio.sleep(0)
    if surplus:
        groups.cancel_surplus()
    else:
        groups.cancel_too_old(100)
    assert all(flight.surplus if surplus else flight.expired for flight in flights), "in one step"
    await eventually(lambda: turns.total == MANY)
    assert turns.most <= A_TURN
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_evaluation_metrics_are_computed_outside_the_loop(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_loop: list[bool] = []

    def noted(act: Callable[..., Any]) -> Callable[..., Any]:
        def do(*given: Any) -> Any:
            in_the_loop.append(threading.current_thread() is threading.main_thread())
            return act(*given)

        return do

    monkeypatch.setattr(evaluation_schedule, "trace_line", noted(evaluation_schedule.trace_line))
    monkeypatch.setattr(Evaluator, "metrics", noted(Evaluator.metrics))
    evaluation = {"interval": 1, "num_tasks": 2}
    outcome = await simulate(make_config(tmp_path, tokenizer_folder, max_steps=1, evaluation=evaluation))
    assert outcome.code == exit_codes.OK
    assert len(in_the_loop) == 2 * (1 + 2)
    assert not any(in_the_loop)


async def test_volume_waiters_resume_in_several_turns(tmp_path: Path) -> None:
    turns, gate = Turns(), threading.Event()

    def write(entries: Sequence[int]) -> None:
        assert gate.wait(60)

    commit = GroupCommit(write, Volume(tmp_path), doing="write")

    async def writer(number: int) -> None:
        await commit.add(number)
        turns()

    async with asyncio.TaskGroup() as group:
        for number in range(MANY):
            group.create_task(writer(number))
        await asyncio.sleep(0)
        gate.set()
    assert turns.total == MANY
    assert turns.most <= A_TURN
    await commit.close()


async def test_recovered_records_are_readmitted_in_several_turns() -> None:
    turns = Turns()
    sampler = Sampler(0, [Source("e", MANY)])
    entries: list[Entry] = [
        RolloutEntry(group, 0, "e", sampler.draw(group).task, 0, 1.0, a_rollout()) for group in reversed(range(MANY))
    ]
    back = await run_stepwise(
        recovery.readmit_entries(
            recovery.Found(entries),
            is_old=lambda version: False,
            ledger=Ledger(),
            sampler=sampler,
            environments=[("e", 1)],
            finish=lambda group: turns(),
            drop=lambda entry: None,
        )
    )
    assert back.groups == turns.total == MANY
    assert turns.most <= A_TURN


class Counted(int):
    """Number that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_ledger_claim_does_not_scan_all_groups() -> None:
    numbers = [Counted(number) for number in range(MANY)]
    ledger = Ledger.restore(LedgerState(MANY, tuple(numbers), {}))
    Counted.compared = 0
    for number in reversed(numbers):
        ledger.claim(number)
    assert Counted.compared < 8 * MANY
    for number in numbers[: MANY // 2]:
        ledger.dispatch_again(number, "age")
    assert [ledger.take() for _ in range(MANY // 2 + 1)] == [*range(MANY // 2), MANY]
    assert ledger.state().open_groups == tuple(range(MANY + 1))


def test_batch_groups_are_chosen_with_few_reads() -> None:
    looks = 0

    class Group:
        def __init__(self, number: int, size: int) -> None:
            self.number, self._rollouts = number, [None] * size

        @property
        def rollouts(self) -> Sequence[None]:
            nonlocal looks
            looks += 1
            return self._rollouts

    groups = [Group(number, 7 + 2 * (number % 2)) for number in range(MANY)]
    chosen = choose_groups(groups, 4 * MANY + 2)  # type: ignore[arg-type]
    assert chosen is not None
    assert sum(7 + 2 * (group.number % 2) for group in chosen) == 4 * MANY + 2
    assert looks <= 8 * MANY
