"""Oversampling: the first finished groups are trained, the others are cancelled in the engines, and the limits hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import FakeEngine, make_config, simulate

from rlrun.inference.client.engine_client import Completion
from rlrun.runtime import exit_codes

BATCH, SLOW_SECONDS = 8, 30.0


@dataclass
class OneOfFourIsSlow(FakeEngine):
    """Engine whose every fourth request takes longer than the test; it counts the largest number of concurrent
    requests.
    """

    most: int = 0
    cut: int = 0
    count: int = 0
    now: int = 0
    slow_running: list[int] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], *, n: int, **more: Any) -> list[Completion]:  # type: ignore[override]
        self.count += 1
        number = self.count
        self.now += n
        self.most = max(self.most, self.now)
        try:
            if number % 4 == 0:
                await asyncio.sleep(SLOW_SECONDS)
            return await super().generate(token_ids, n=n, **more)
        except asyncio.CancelledError:
            self.cut += 1
            raise
        finally:
            self.now -= n


def metrics_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("depth", "oldest"), [(0, 0), (2, 6)])
@pytest.mark.parametrize("factor", [1.5, 3.0])
async def test_slow_rollouts_are_not_waited_for(
    tmp_path: Path, tokenizer_folder: Path, depth: int, oldest: int, factor: float
) -> None:
    engine = OneOfFourIsSlow()
    config = make_config(
        tmp_path,
        tokenizer_folder,
        max_steps=5,
        oversampling_factor=factor,
        algorithm={"max_async_level": depth, "max_off_policy_steps": oldest},
    )
    async with asyncio.timeout(SLOW_SECONDS * 0.9):
        outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    assert engine.cut > 0, "what is not needed ends in the engine"
    assert engine.most <= BATCH * (depth + factor)
    assert [len(groups) for groups in outcome.groups] == [BATCH // 2] * 5
    trained = [group for groups in outcome.groups for group in groups]
    assert len(trained) == len(set(trained))
    for batch in outcome.trainer.batches:
        assert all(batch.step - 1 - sample.dispatch_version <= oldest for sample in batch.samples)
    lines = [line for line in metrics_of(outcome.paths.metrics) if line["step"]]
    assert sum(line["groups/dropped/surplus"] for line in lines) > 0
    assert sum(line["removed/surplus/rollouts"] for line in lines) > 0
    assert all(line["errors"] == 0 for line in lines)


async def test_run_without_oversampling_starts_no_extra_rollouts(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    config = make_config(tmp_path, tokenizer_folder, max_steps=3, algorithm={"max_async_level": 0})
    outcome = await simulate(config, engines=[engine])
    assert sum(n for *_, n in engine.requests) == 3 * BATCH
    assert engine.aborted == 0
    assert all(line.get("groups/dropped/surplus", 0) == 0 for line in metrics_of(outcome.paths.metrics))


@pytest.mark.parametrize("factor", [1.0, 1.5])
async def test_filtered_groups_are_refilled_in_synchronous_runs(
    tmp_path: Path, tokenizer_folder: Path, factor: float
) -> None:
    """Half of the groups have equal rewards and are replaced by groups of the same version."""
    config = make_config(
        tmp_path,
        tokenizer_folder,
        max_steps=4,
        oversampling_factor=factor,
        algorithm={"max_async_level": 0, "max_off_policy_steps": 0, "filters": {"zero_variance": True}},
    )
    outcome = await simulate(config, engines=[FakeEngine(lambda: 0.002)])
    assert outcome.code == exit_codes.OK
    assert sum(line["groups/dropped/zero_variance"] for line in metrics_of(outcome.paths.metrics) if line["step"]) > 0
    for batch in outcome.trainer.batches:
        assert {sample.dispatch_version for sample in batch.samples} == {batch.step - 1}
        assert len({(sample.group, sample.rollout) for sample in batch.samples}) == BATCH


@pytest.mark.parametrize("killed_after", [1, 2, 4])
async def test_killed_run_trains_no_group_twice(tmp_path: Path, tokenizer_folder: Path, killed_after: int) -> None:
    config = make_config(
        tmp_path,
        tokenizer_folder,
        max_steps=6,
        oversampling_factor=2.0,
        environments=[{"id": "reverse-text", "group_size": 2, "curriculum": {"easy": {"threshold": 0.9}}}],
    )
    first = await simulate(
        config, engines=[OneOfFourIsSlow()], until=lambda trainer: len(trainer.batches) >= killed_after
    )
    second = await simulate(config, engines=[OneOfFourIsSlow()], number=2)
    assert second.code == exit_codes.OK
    base = second.trainer.attempt.base_step
    trained = [group for groups in first.groups[:base] + second.groups for group in groups]
    assert len(trained) == len(set(trained)) == 6 * BATCH // 2
