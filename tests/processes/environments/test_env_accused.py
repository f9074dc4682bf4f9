"""Tasks that end their process, and the innocent rollouts next to them, which are replayed until they succeed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from rlrun.environments import Episode, EpisodeError, Score
from rlrun.environments.process import isolated, supervised
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import Death, Ready, Talk, _Rollout
from rlrun.environments.process.wire import Document, WireError
from rlrun.environments.protocol import ModelClient
from rlrun.environments.stage import Played, TaskRef
from tests.support.waiting import UNREACHED_SECONDS, wait_until_async

DEADLY = [TaskRef("train", i) for i in range(3)]
INNOCENT = [TaskRef("train", i) for i in range(3, 11)]
DEADLY_TURNS = 5
"""Turns of the event loop after which a deadly rollout ends its process; independent of the clock, so load changes nothing."""
INNOCENT_TURNS = 200


class Fragile(Talk):
    """Environment process without an operating system process."""

    numbers = itertools.count(1)

    async def start(self) -> Ready:
        return Ready(self.id, True, False, len(DEADLY) + len(INNOCENT), 0)

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        number, rollout = next(self.numbers), _Rollout(task, model, asyncio.get_running_loop().create_future())
        self._rollouts[number] = rollout
        try:
            for _ in range(DEADLY_TURNS if task in DEADLY else INNOCENT_TURNS + 10 * task.index):
                await asyncio.sleep(0)
                if rollout.result.done():
                    return await rollout.result
            if task in DEADLY:
                self._report_end(Death("crash", "ended", number))
                return await rollout.result
            return Played(str(task), Episode([], 1), Score(1.0))
        finally:
            del self._rollouts[number]

    def end(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def _handle_pong(self, document: Document) -> None: ...

    def _on_connection_lost(self, error: WireError | None) -> None: ...


@pytest.mark.parametrize("workers", [1, 2])
async def test_deadly_tasks_wait_for_rollouts_that_they_ended(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as an innocent rollout waits, deadly tasks must wait: together they would end each process before it finishes."""
    monkeypatch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.0)
    environment = IsolatedEnvironment("e", Command("e", {}), Limits(), [Log(None) for _ in range(workers)])
    for worker in environment.workers:
        worker._make = lambda number: Fragile("e", number)
        worker.life = worker._make(next(environment._record.numbers))
        worker._watch_end(worker.life)
    record = environment._record
    most_in_row = 0
    done: list[TaskRef] = []
    ends: set[int] = set()

    async def play(task: TaskRef) -> bool:
        nonlocal most_in_row
        model: Any = None
        try:
            await environment.play(task, model, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
        except EpisodeError as error:
            ends.add(error.death)
            if len(done) < len(INNOCENT):
                most_in_row = max(most_in_row, record.in_row)
            return False
        return True

    async def until_played(task: TaskRef) -> None:
        while not await play(task):
            pass
        done.append(task)

    async def again_and_again(task: TaskRef) -> None:
        while len(done) < len(INNOCENT):
            assert not await play(task)

    await environment.start()
    running = asyncio.ensure_future(environment.run())
    playing = [asyncio.ensure_future(again_and_again(task)) for task in DEADLY]
    innocent = asyncio.gather(*(until_played(task) for task in INNOCENT))
    try:
        await wait_until_async(
            lambda: running.done() or innocent.done(),
            "all innocent tasks are played",
            progress=lambda: (len(done), record.restarts),
        )
        assert not innocent.done() or innocent.exception() is None
        assert not running.done(), f"the run has ended after {record.restarts} ends: {running.exception()}"
        assert sorted(done, key=lambda task: task.index) == INNOCENT
        # A suspect is replayed once before its first end is counted.
        assert most_in_row <= 2 * len(DEADLY) + workers, "a known culprit was played before what it had ended"
        assert 0 not in ends
        assert record.accused == {*DEADLY}
    finally:
        for task in (*playing, innocent, running):
            task.cancel()
        await asyncio.gather(*playing, innocent, running, return_exceptions=True)


class Asked(Fragile):
    """Process that records the deadlines of its episodes."""

    left: list[float]

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        self.left.append(timeout_seconds)
        return Played(str(task), Episode([], 1), Score(1.0))

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float, number: int = 0
    ) -> list[Score]:
        self.left.append(timeout_seconds)
        return []


async def make_restarting_environment(limits: Limits | None = None) -> tuple[IsolatedEnvironment, list[float]]:
    """Return an environment with a stopped process, and the deadlines of the episodes that it plays after the restart."""
    environment, left = IsolatedEnvironment("e", Command("e", {}), limits or Limits(), [Log(None)]), list[float]()
    worker = environment.workers[0]
    worker.life = life = Asked("e", 1)
    life.left = left
    return environment, left


@pytest.mark.parametrize("compares", [False, True])
async def test_episode_deadline_pauses_during_process_restart(compares: bool) -> None:
    environment, left = await make_restarting_environment()
    model: Any = None
    deadlines = {"timeout_seconds": 0.2, "reward_seconds": 1.0}
    if compares:
        playing: asyncio.Future[Any] = asyncio.ensure_future(environment.compare(INNOCENT[0], [], **deadlines))
    else:
        playing = asyncio.ensure_future(environment.play(INNOCENT[0], model, **deadlines))
    await asyncio.sleep(0.3)
    environment.workers[0]._set_up(True)
    await playing
    assert left == [pytest.approx(0.2, abs=0.1)]


async def test_deadline_of_accused_episode_does_not_pause() -> None:
    environment, left = await make_restarting_environment()
    environment._record.accused.add(DEADLY[0])
    model: Any = None
    with pytest.raises(EpisodeError, match=r"did not restart within 0\.0") as caught:
        await environment.play(DEADLY[0], model, timeout_seconds=0.05, reward_seconds=1.0)
    assert (caught.value.kind, left) == ("timeout", [])


async def test_episode_waits_no_longer_than_restart_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "MAX_BACKOFF_SECONDS", 0.02)
    environment, left = await make_restarting_environment(Limits(start_seconds=0.03))
    model: Any = None
    with pytest.raises(EpisodeError, match=r"did not restart within 0\.1 ") as caught:
        await environment.play(INNOCENT[0], model, timeout_seconds=0.05, reward_seconds=1.0)
    assert (caught.value.kind, left) == ("timeout", [])
