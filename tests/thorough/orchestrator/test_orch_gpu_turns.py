"""Trainer and engines on shared GPUs: never both active, for every failure.

The simulated engine refuses requests while it sleeps and weights during the trainer's turn; the simulated trainer
refuses a batch while an engine is awake.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import FakeEngine, FakeTrainer, eventually, make_config, simulate

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.inference.client.engine_client import EngineError
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.engines import weight_sync as module
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.engines.weight_sync import GPUTurns, WeightSync
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


def config_of(root: Path, tokenizer: Path, **changes: Any) -> OrchestratorConfig:
    algorithm = {"max_async_level": 0, "max_off_policy_steps": 4}
    return make_config(root, tokenizer, **({"algorithm": algorithm, "colocated": True, "max_steps": 3} | changes))


def engines(count: int = 2) -> list[FakeEngine]:
    rng = random.Random(0)
    return [FakeEngine(lambda: rng.random() / 500, update_seconds=0.002) for _ in range(count)]


def assert_in_turn(trainer: FakeTrainer, beside: Sequence[FakeEngine]) -> None:
    for engine in beside:
        assert engine.wrong == []
    for batch in trainer.batches:
        assert {v for s in batch.samples for v in s.versions[s.loss_mask].tolist()} == {batch.step - 1}


async def test_engines_and_trainer_alternate_on_the_gpus(tmp_path: Path, tokenizer_folder: Path) -> None:
    beside = engines()
    outcome = await simulate(
        config_of(tmp_path, tokenizer_folder), engines=beside, step_seconds=lambda: random.random() / 100
    )
    assert outcome.code == exit_codes.OK
    assert_in_turn(outcome.trainer, beside)
    for engine in beside:
        assert (engine.slept, engine.held) == (3, [0, 1, 2, 3][: len(engine.held)])
        assert len(engine.held) >= 3  # the last version may arrive after the run has ended
    metrics = [json.loads(line) for line in outcome.paths.metrics.read_text().splitlines()]
    assert all(line["time/engines_asleep"] >= 0 for line in metrics)


async def test_running_rollouts_and_evaluations_delay_the_trainer(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Groups of different sizes keep more rollouts in flight than the batch needs."""
    beside = engines()
    config = config_of(
        tmp_path,
        tokenizer_folder,
        environments=[{"id": "reverse-text", "group_size": 4}, {"id": "arithmetic", "group_size": 6}],
        batch_size=12,
        evaluation={"interval": 1, "num_tasks": 5, "samples_per_task": 2},
    )
    outcome = await simulate(config, engines=beside)
    assert outcome.code == exit_codes.OK
    assert all(engine.wrong == [] for engine in beside)
    metrics = [json.loads(line) for line in outcome.paths.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics if "eval/reverse-text/reward/mean" in line] == [0, 1, 2, 3]
    assert sum(line.get("eval/reverse-text/errors", 0) for line in metrics) == 0


async def test_failed_sleep_is_retried(tmp_path: Path, tokenizer_folder: Path) -> None:
    beside = engines()
    beside[1].insomnia = 3
    outcome = await simulate(config_of(tmp_path, tokenizer_folder, max_steps=2), engines=beside)
    assert outcome.code == exit_codes.OK
    assert (beside[1].insomnia, beside[1].slept) == (0, 2)
    assert_in_turn(outcome.trainer, beside)


@pytest.mark.parametrize("moment", ["training", "awake"])
async def test_new_attempt_wakes_sleeping_engines(tmp_path: Path, tokenizer_folder: Path, moment: str) -> None:
    """All roles restart together. An engine that was awake is replaced by a new one; both start asleep."""
    beside, config = engines(), config_of(tmp_path, tokenizer_folder, checkpoint={"interval": 1})
    looks = {
        "training": lambda t: t.has_gpus and len(t.batches) == 1,
        "awake": lambda t: 1 in beside[0].held,
    }
    first = await simulate(config, engines=beside, step_seconds=lambda: 0.01, until=looks[moment])
    second = await simulate(config, engines=beside, number=2)
    assert second.code == exit_codes.OK
    assert_in_turn(second.trainer, beside)
    base = second.trainer.attempt.base_step
    trained = [group for groups in first.groups[:base] + second.groups for group in groups]
    assert len(trained) == len(set(trained)) == 3 * 4


class Unwilling:
    """Engine that refuses to sleep."""

    def __init__(self, status: int) -> None:
        self.status, self.asked = status, 0

    async def sleep(self) -> None:
        self.asked += 1
        raise EngineError("it does not want to", self.status)


def turns_of(engine: Any, quiet: list[bool]) -> tuple[GPUTurns, EnginePool, Signal]:
    signal = Signal()
    pool = EnginePool([Replica("http://engine", engine)], signal)
    sync = WeightSync(pool, signal, timeout_seconds=1)
    turns = GPUTurns(pool, sync, signal, timeout_seconds=1, quiet=lambda: quiet[0])
    turns.published(0, "v0")
    turns.released(0)
    return turns, pool, signal


@pytest.mark.parametrize(("status", "code"), [(500, exit_codes.FAILURE), (400, exit_codes.CONFIGURATION)])
async def test_engine_that_cannot_sleep_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    monkeypatch.setattr(module, "SLEEP_SECONDS", 0.0)
    engine = Unwilling(status)
    turns, _, _ = turns_of(engine, [True])
    with pytest.raises(ExceptionGroup) as failed:
        await turns.to_trainer(1)
    cause = first_cause(failed.value)
    assert isinstance(cause, RoleError)
    assert cause.code == code
    assert "it does not want to" in str(cause)


async def test_engines_sleep_only_after_all_requests_end() -> None:
    engine, quiet = FakeEngine(), [False]
    turns, pool, signal = turns_of(engine, quiet)
    pool.replicas[0].version = 0
    first = asyncio.create_task(turns.to_trainer(1))
    signal.notify()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (engine.slept, pool.replicas[0].version) == (0, 0), "it may be asked until all is quiet"
    quiet[0] = True
    signal.notify()
    async with asyncio.timeout(30):
        await first
    assert (engine.slept, pool.replicas[0].version) == (1, None)
    second = asyncio.create_task(turns.to_trainer(2))
    signal.notify()
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.slept == 1, "the trainer has not released the GPUs after step 1"
    turns.published(1, "v1")
    assert turns.released(1) == "v1"
    signal.notify()
    async with asyncio.timeout(30):
        await second


async def test_running_weight_update_is_not_interrupted() -> None:
    engine = FakeEngine()
    turns, pool, signal = turns_of(engine, [True])
    pool.replicas[0].updating = True
    waiting = asyncio.create_task(turns.to_trainer(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.slept == 0
    pool.replicas[0].updating = False
    signal.notify()
    async with asyncio.timeout(30):
        await waiting
    assert engine.slept == 1


async def test_removed_engine_is_not_waited_for() -> None:
    engine = Unwilling(500)
    turns, pool, _ = turns_of(engine, [True])

    waiting = asyncio.create_task(turns.to_trainer(1))
    await eventually(lambda: engine.asked > 0)
    pool.remove(pool.replicas[0], "its pod is gone")
    async with asyncio.timeout(30):
        await waiting


async def test_release_of_unpublished_version_is_refused() -> None:
    turns, _, _ = turns_of(Unwilling(500), [True])
    with pytest.raises(RoleError, match="for version 1, which it has not published"):
        turns.released(1)
