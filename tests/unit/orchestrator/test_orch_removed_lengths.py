"""Lengths of rollouts that are removed for age, as surplus or after an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from orch_journal_world import a_rollout
from orch_simulation import FakeEngine, eventually, make_config

from rlrun.config.models.rollout import SamplingConfig
from rlrun.inference.client.completions import Completion
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Affinity, Replica
from rlrun.orchestrator.groups.filters import rules_of
from rlrun.orchestrator.groups.groups import Groups, Outcome
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.progress.step_metrics import counter_metrics
from rlrun.orchestrator.rollouts.engine_session import Opening, Session
from rlrun.orchestrator.tasks.sampler import Sampler

CONFIG = make_config(Path("run"), Path("model"), algorithm={"max_async_level": 1, "max_off_policy_steps": 2})
PACE = 0.01


class Halting(FakeEngine):
    """Engine that answers only the first request, with five tokens."""

    asks = 0

    async def generate(self, token_ids: object, *, n: int, **_: object) -> list[Completion]:  # type: ignore[override]
        self.asks += 1
        if self.asks > 1:
            await asyncio.Event().wait()
        return [Completion([7] * 5, [-1.0] * 5, [3] * 5, "stop")] * n


@pytest.mark.parametrize(
    ("expired", "surplus", "outcome", "reason"),
    [
        (True, False, None, "age"),
        (False, True, None, "surplus"),
        (False, True, "error", "surplus"),
        (False, False, "error", "error"),
        (False, False, "engine", None),
    ],
)
def test_removed_group_reports_lengths_of_its_rollouts(
    expired: bool, surplus: bool, outcome: Outcome, reason: str | None
) -> None:
    rules = rules_of(CONFIG, vocabulary=100)
    ledger, sampler = Ledger(), Sampler.from_config(CONFIG, [100])
    groups = Groups(CONFIG, made=0, ledger=ledger, sampler=sampler, rules=rules, journal=None, signal=Signal())
    flight = groups.take(0)
    flight.members[0], flight.expired, flight.surplus = a_rollout([0], 1.0), expired, surplus
    flight.cut.append(30)
    length = flight.members[0].loss_tokens
    groups.end(flight, outcome)
    metrics = counter_metrics(ledger.counters, {})
    for name in ("age", "error", "surplus"):
        assert metrics[f"removed/{name}/rollouts"] == 2 * (name == reason)
        mean = metrics.get(f"removed/{name}/completion_length/mean")
        assert mean == ((30 + length) / 2 if name == reason else None)


async def waiting(session: Session, engine: Halting, asks: int) -> asyncio.Task[Completion]:
    asking = asyncio.create_task(session([1], max_tokens=20))
    await eventually(lambda: engine.asks == asks)
    return asking


async def test_running_request_tokens_are_estimated_from_elapsed_time() -> None:
    engine = Halting()
    replica = Replica("http://e", engine, version=3, handed=3)
    session = Session(EnginePool([replica], Signal()), SamplingConfig(), [])
    assert session.tokens_so_far() == 0
    await session([1], max_tokens=20)
    assert session.tokens_so_far() == 5
    replica.seconds_per_token = PACE
    asking = await waiting(session, engine, 2)
    assert 5 <= session.tokens_so_far() <= 25
    await eventually(lambda: session.tokens_so_far() >= 10)
    await eventually(lambda: session.tokens_so_far() == 25)  # at most the requested number
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert session.tokens_so_far() == 25


async def test_members_sharing_first_request_have_equal_token_estimates() -> None:
    engine = Halting()
    engine.asks = 1
    replica = Replica("http://e", engine, version=3, handed=3)
    replica.seconds_per_token = PACE
    pool, opening, affinity = EnginePool([replica], Signal()), Opening(2), Affinity()
    sessions = [Session(pool, SamplingConfig(), [], opening=opening, affinity=affinity) for _ in range(2)]
    asking = [await waiting(session, engine, 2) for session in sessions]
    await eventually(lambda: all(session.tokens_so_far() >= 3 for session in sessions))
    first, second = (session.tokens_so_far() for session in sessions)
    assert abs(first - second) <= 10
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_queued_request_has_zero_tokens() -> None:
    pool = EnginePool([], Signal())
    session = Session(pool, SamplingConfig(), [])
    asking = asyncio.create_task(session([1], max_tokens=20))
    await eventually(lambda: pool.waiting == 1)
    assert session.tokens_so_far() == 0
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
