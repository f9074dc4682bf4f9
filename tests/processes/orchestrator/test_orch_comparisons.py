"""Group rewards in a run: training, evaluation, and comparison after a restart."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from orch_environments import Ranked
from orch_simulation import FakeEngine, Outcome, make_config, simulate

from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

RANKED = [{"id": "orch_environments:ranked", "group_size": 4}]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranked, "held", False)
    monkeypatch.setattr(Ranked, "waiting", 0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_ranked(outcome: Outcome) -> None:
    """Assert that each trained group has the rewards of its comparison."""
    for batch in outcome.trainer.batches:
        groups = defaultdict(list)
        for sample in batch.samples:
            groups[sample.group].append((sample.input_ids[sample.loss_mask].tolist(), sample.reward))
        for members in groups.values():
            assert len(members) == 4
            assert min(reward for _, reward in members) == 0.0
            if len({tuple(tokens) for tokens, _ in members}) == 4:
                assert sorted(reward for _, reward in members) == [0.0, 0.25, 0.5, 0.75]


async def test_group_rewards_come_from_its_comparison(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    evaluation = {"interval": 2, "num_tasks": 3, "samples_per_task": 4}
    config = make_config(tmp_path, tokenizer_folder, max_steps=2, environments=RANKED, evaluation=evaluation)
    outcome = await simulate(config, open_environments=open_arenas)
    assert outcome.code == exit_codes.OK
    check_ranked(outcome)
    metrics = read_lines(outcome.paths.metrics)
    own = {key: value for key, value in metrics[-1].items() if "env/" in key and key.endswith(("size", "size/mean"))}
    assert set(own.values()) == {4.0}, metrics[-1]
    answers = read_lines(outcome.paths.evaluation_trace(2))
    assert len(answers) == 12
    assert {answer["metrics"]["size"] for answer in answers} == {4}
    by_task = defaultdict(list)
    for answer in answers:
        by_task[answer["task_id"]].append(answer["reward"])
    assert all(min(rewards) == 0.0 and len(rewards) == 4 for rewards in by_task.values())
    assert max(answer["reward"] for answer in answers) > 0


async def test_uncompared_group_is_compared_after_restart(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_config(tmp_path, tokenizer_folder, max_steps=3, environments=RANKED)
    Ranked.held = True
    first = await simulate(config, until=lambda _: Ranked.waiting >= 2)
    assert not first.trainer.batches
    Ranked.held, Ranked.waiting = False, 0
    engine = FakeEngine()
    second = await simulate(config, engines=[engine], number=2)
    assert second.code == exit_codes.OK
    check_ranked(second)
    played = sum(count for *_, count in engine.requests)
    assert played <= 3 * 8 - 8, "the members of two groups were in the journal"


async def test_failed_comparisons_drop_groups_and_can_end_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [{"id": "orch_environments:quarrelsome", "group_size": 2}]
    config = make_config(tmp_path, tokenizer_folder, max_steps=3, environments=environments, max_error_ratio=0.3)
    with pytest.raises(BaseExceptionGroup) as caught:
        await simulate(config)
    error = first_cause(caught.value)
    assert isinstance(error, RoleError)
    assert re.search(r"task '.*': compare\(\) raised RuntimeError: no two judges agree", str(error))
