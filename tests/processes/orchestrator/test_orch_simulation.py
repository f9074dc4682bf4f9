"""Whole orchestrator with a fake trainer and fake engines."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orch_simulation import FakeEngine, FakeTrainer, eventually, make_config, simulate

from rlrun.environments.process import supervised as supervised_module
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.rollouts import dispatcher as dispatcher_module
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun.protocol.files.batch import BatchError, read_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from tests.support.python_path import before


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_synchronous_run_trains_only_tokens_of_current_policy(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_config(
        tmp_path, tokenizer_folder, algorithm={"max_async_level": 0, "max_off_policy_steps": 0}, max_steps=5
    )
    outcome = await simulate(config)
    assert outcome.code == exit_codes.OK
    assert [batch.step for batch in outcome.trainer.batches] == [1, 2, 3, 4, 5]
    for batch in outcome.trainer.batches:
        for sample in batch.samples:
            assert set(sample.versions[sample.loss_mask].tolist()) == {batch.step - 1}
            assert sample.dispatch_version == batch.step - 1
        assert len(batch.samples) == 8
    metrics = read_lines(outcome.paths.metrics)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert {line["off_policy/max"] for line in metrics} == {0.0}
    assert all(line["loss"] == 0.5 and 0 <= line["reward/mean"] <= 1 for line in metrics)


async def test_trained_tokens_equal_engine_tokens(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    outcome = await simulate(make_config(tmp_path, tokenizer_folder, max_steps=2), engines=[engine])
    seen = {tuple(ids) for ids in engine.seen}
    for batch in outcome.trainer.batches:
        for sample in batch.samples:
            assert tuple(sample.input_ids.tolist()) in seen
            sampled = sample.input_ids[sample.loss_mask]
            np.testing.assert_allclose(sample.logprobs[sample.loss_mask], -0.5 - 0.01 * sampled, rtol=1e-6)
            assert (sample.advantages[~sample.loss_mask] == 0).all()


@pytest.mark.parametrize(("trainer_ms", "token_ms"), [(30, 1), (0, 8), (10, 4)])
async def test_group_age_and_dispatch_stay_within_bounds(
    tmp_path: Path, tokenizer_folder: Path, trainer_ms: int, token_ms: int
) -> None:
    depth, limit = 2, 2
    rng = random.Random(trainer_ms)
    engine = FakeEngine(lambda: rng.choice([0, 0, 1, 12]) * token_ms / 1000)
    config = make_config(
        tmp_path,
        tokenizer_folder,
        max_steps=10,
        algorithm={"max_async_level": depth, "max_off_policy_steps": limit},
    )
    outcome = await simulate(config, engines=[engine], step_seconds=lambda: trainer_ms / 1000)
    assert outcome.code == exit_codes.OK
    assert [batch.step for batch in outcome.trainer.batches] == list(range(1, 11))
    for batch in outcome.trainer.batches:
        for sample in batch.samples:
            assert sample.dispatch_version >= batch.step - 1 - limit
            assert int(sample.versions[sample.loss_mask].max()) <= batch.step - 1
    # Rollouts that started while version v was the newest never exceed the demand of the steps up to v+1+depth.
    for version in range(11):
        started = sum(count for _, _, held, count in engine.requests if held is not None and held <= version)
        wasted = sum(line["groups/cancelled/age"] for line in read_lines(outcome.paths.metrics)) * 2
        assert started <= (version + 1 + depth) * 8 + wasted
    trained = [group for groups in outcome.groups for group in groups]
    assert len(trained) == len(set(trained)) == 40


async def test_stale_group_is_aborted_in_engine_and_replayed(tmp_path: Path, tokenizer_folder: Path) -> None:
    slow = iter([5.0])  # The first group would take far longer than the whole run.
    engine = FakeEngine(lambda: next(slow, 0.0))
    config = make_config(
        tmp_path, tokenizer_folder, max_steps=8, algorithm={"max_async_level": 1, "max_off_policy_steps": 1}
    )
    outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    assert engine.aborted == 1
    trained = [group for groups in outcome.groups for group in groups]
    assert sorted(trained)[:5] == [0, 1, 2, 3, 4]
    assert 0 not in outcome.groups[0]
    # Steps are 15 ms apart: on a busy machine another group may be too old before its request is sent.
    assert sum(line["groups/cancelled/age"] for line in read_lines(outcome.paths.metrics)) >= 1


async def test_single_turn_group_is_one_request(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    await simulate(make_config(tmp_path / "a", tokenizer_folder, max_steps=2), engines=[engine])
    assert {count for *_, count in engine.requests} == {2}
    environments = [{"id": "calculator", "group_size": 2}]
    many = FakeEngine()
    await simulate(
        make_config(tmp_path / "b", tokenizer_folder, max_steps=2, environments=environments, seq_len=512),
        engines=[many],
    )
    assert {count for *_, count in many.requests} == {1}


async def test_loaded_callback_runs_once_before_first_request(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine, told = FakeEngine(), list[int]()
    config = make_config(tmp_path, tokenizer_folder, max_steps=1)
    await simulate(config, engines=[engine], loaded=lambda: told.append(len(engine.requests)))
    assert told == [0]


async def test_requests_carry_version_and_avoid_outdated_replicas(tmp_path: Path, tokenizer_folder: Path) -> None:
    engines = [FakeEngine(lambda: 0.001, update_seconds=0.003), FakeEngine(lambda: 0.001, update_seconds=0.004)]
    outcome = await simulate(make_config(tmp_path, tokenizer_folder), engines=engines, step_seconds=lambda: 0.01)
    assert outcome.code == exit_codes.OK
    for engine in engines:
        assert all(salt == str(held) for _, salt, held, _ in engine.requests)
        assert engine.held == sorted(engine.held)
    assert engines[0].requests
    assert engines[1].requests


async def test_failed_replica_rejoins_during_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    engines = [FakeEngine(lambda: 0.001), FakeEngine(lambda: 0.001)]
    back: list[int] = []

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: len(trainer.batches) >= 2)
        engines[1].down = True
        before = len(engines[0].requests)
        await eventually(lambda: len(engines[0].requests) >= before + 8)
        engines[1].down = False
        back.append(len(engines[1].requests))

    config = make_config(tmp_path, tokenizer_folder, max_steps=30, checkpoint={"interval": 50})
    outcome = await simulate(config, engines=engines, during=world, step_seconds=lambda: 0.02)
    assert outcome.code == exit_codes.OK
    assert back
    assert len(engines[1].requests) > back[0]
    trained = [group for groups in outcome.groups for group in groups]
    assert sorted(trained) == list(range(120))
    assert all(line["errors"] == 0 for line in read_lines(outcome.paths.metrics))


async def test_dominant_errors_end_run_and_name_environment(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [
        {"id": "reverse-text", "group_size": 2},
        {"id": "orch_environments:faulty", "name": "judged", "group_size": 2, "ratio": 9},
    ]
    with pytest.raises(ExceptionGroup) as caught:
        await simulate(make_config(tmp_path, tokenizer_folder, environments=environments, max_steps=50))
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.DATA
    assert "'judged'" in str(cause)
    assert "the judge is on holiday" in str(cause)


async def test_dead_environment_process_fails_only_its_rollouts(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))
    environments = [
        {"id": "reverse-text", "group_size": 2, "ratio": 3},
        {
            "id": "orch_environments:mortal",
            "name": "mortal/one",
            "group_size": 2,
            "args": {"marker": str(tmp_path / "m")},
        },
    ]
    # A stale rollout would be cancelled while its process is slow, before the process dies.
    patient = {"max_async_level": 2, "max_off_policy_steps": 8}
    config = make_config(tmp_path / "run", tokenizer_folder, environments=environments, max_steps=8, algorithm=patient)
    outcome = await simulate(config, open_environments=open_arenas)
    assert outcome.code == exit_codes.OK
    assert {sample.environment for batch in outcome.trainer.batches for sample in batch.samples} == {
        "reverse-text",
        "mortal/one",
    }
    metrics = read_lines(outcome.paths.metrics)
    told = [{name: value for name, value in line.items() if "mortal" in name or "errors" in name} for line in metrics]
    assert sum(line.get("errors/mortal/one/crash", 0) for line in metrics) >= 1, told
    assert not any("errors/reverse-text" in name for line in metrics for name in line)
    assert metrics[-1]["environment/mortal/one/restarts"] == 1
    assert metrics[-1]["environment/reverse-text/restarts"] == 0
    logs = outcome.paths.logs(1, "orchestrator")
    assert (logs / "environment-mortal_one.log").read_text() == "farewell\n"


def write_prompts(folder: Path, *, long: int, short: int) -> dict[str, Any]:
    """Return an environment with a data set of prompts longer than `seqLen` and shorter ones."""
    rows = [{"prompt": ("a" * 200 if i < long else "hi") + str(i), "ground_truth": str(i)} for i in range(long + short)]
    for split in ("train", "test"):
        text = "".join(json.dumps(row | {"prompt": f"{row['prompt']}{split[0]}"}) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    args = {"path": str(folder), "train_split": "train", "eval_split": "test", "reward": "exact"}
    return {"id": "dataset", "group_size": 4, "args": args}


async def test_overlong_tasks_are_excluded_without_errors(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [write_prompts(tmp_path, long=4, short=12)]
    # Without a decision per task, each overlong prompt would count 12 errors: 4 rollouts with three tries each.
    config = make_config(
        tmp_path / "run", tokenizer_folder, environments=environments, max_steps=20, max_error_ratio=0.01
    )
    outcome = await simulate(config)
    assert outcome.code == exit_codes.OK
    metrics = read_lines(outcome.paths.metrics)
    assert sum(line["errors"] for line in metrics) == 0
    # Each task is decided once; its groups are dropped again in each later epoch.
    assert sum(line.get("unplayable/dataset/too_long", 0) for line in metrics) == 4
    assert sum(line["groups/dropped/unplayable"] for line in metrics) > 4


async def test_run_with_mostly_unplayable_tasks_ends_with_fix(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [write_prompts(tmp_path, long=12, short=4)]
    with pytest.raises(ExceptionGroup) as caught:
        await simulate(make_config(tmp_path / "run", tokenizer_folder, environments=environments, max_steps=50))
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.DATA
    assert "groups of environment 'dataset' have unplayable tasks (too_long: 9" in str(cause)
    assert "increase seqLen" in str(cause)


async def test_failing_environment_is_dropped_below_error_limit(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [
        {"id": "reverse-text", "group_size": 2, "ratio": 9},
        {"id": "orch_environments:faulty", "name": "judged", "group_size": 2},
    ]
    outcome = await simulate(make_config(tmp_path, tokenizer_folder, environments=environments, max_error_ratio=1.0))
    assert outcome.code == exit_codes.OK
    metrics = read_lines(outcome.paths.metrics)
    assert sum(line["groups/dropped/error"] for line in metrics) >= 1
    assert {sample.environment for batch in outcome.trainer.batches for sample in batch.samples} == {"reverse-text"}
    assert dispatcher_module.MAX_RETRIES >= 1
    errors = sum(line["errors"] for line in metrics)
    assert errors >= 1 + dispatcher_module.MAX_RETRIES
    assert sum(line.get("errors/judged/reward", 0) for line in metrics) == errors


async def test_groups_without_variance_are_replaced(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [
        {"id": "reverse-text", "group_size": 4},
        {"id": "orch_environments:constant", "name": "flat", "group_size": 4},
    ]
    algorithm = {"max_async_level": 1, "max_off_policy_steps": 2, "filters": {"zero_variance": True}}
    outcome = await simulate(make_config(tmp_path, tokenizer_folder, environments=environments, algorithm=algorithm))
    assert outcome.code == exit_codes.OK
    for batch in outcome.trainer.batches:
        rewards: dict[int, set[float]] = {}
        for sample in batch.samples:
            rewards.setdefault(sample.group, set()).add(sample.reward)
        assert all(len(values) > 1 for values in rewards.values())
        assert len(batch.samples) == 8
    assert sum(line["groups/dropped/zero_variance"] for line in read_lines(outcome.paths.metrics)) > 0


async def test_mixed_group_sizes_do_not_block_a_synchronous_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    environments = [
        {"id": "reverse-text", "group_size": 4},
        {"id": "arithmetic", "group_size": 6},
    ]
    algorithm = {"max_async_level": 0, "max_off_policy_steps": 0}
    config = make_config(tmp_path, tokenizer_folder, environments=environments, algorithm=algorithm, batch_size=12)
    outcome = await simulate(config)
    assert outcome.code == exit_codes.OK
    for batch in outcome.trainer.batches:
        assert 12 <= len(batch.samples) < 18
        assert {v for s in batch.samples for v in s.versions[s.loss_mask].tolist()} == {batch.step - 1}


async def test_multi_turn_conversation_is_one_verbatim_sample(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine = FakeEngine(letters=(73, 91, 83, 15))  # These letters sometimes spell calls of the calculator.
    environments = [{"id": "calculator", "group_size": 2}]
    config = make_config(tmp_path, tokenizer_folder, environments=environments, seq_len=512, max_steps=3)
    outcome = await simulate(config, engines=[engine])
    seen = {tuple(ids) for ids in engine.seen}
    for batch in outcome.trainer.batches:
        for sample in batch.samples:
            assert tuple(sample.input_ids.tolist()) in seen


async def test_evaluation_uses_one_version_while_training_continues(tmp_path: Path, tokenizer_folder: Path) -> None:
    engine = FakeEngine(lambda: 0.002)
    config = make_config(
        tmp_path, tokenizer_folder, max_steps=6, evaluation={"interval": 2, "num_tasks": 5, "samples_per_task": 2}
    )
    outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    metrics = read_lines(outcome.paths.metrics)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5, 6]
    with_evaluation = [line["step"] for line in metrics if "eval/reverse-text/reward/mean" in line]
    assert with_evaluation == [0, 2, 4, 6]
    assert all(line.get("eval/reverse-text/errors", 0) == 0 for line in metrics)
    for version in with_evaluation:
        answers = read_lines(outcome.paths.evaluation_trace(version))
        assert len(answers) == 10
        assert {answer["policy_version"] for answer in answers} == {version}


@pytest.mark.parametrize("killed_after", [1, 3, 5, 7])
async def test_killed_run_loses_and_repeats_no_group(tmp_path: Path, tokenizer_folder: Path, killed_after: int) -> None:
    algorithm = {"max_async_level": 2, "max_off_policy_steps": 8}
    config = make_config(tmp_path, tokenizer_folder, max_steps=9, algorithm=algorithm)
    rng = random.Random(killed_after)
    first = await simulate(
        config,
        engines=[FakeEngine(lambda: rng.random() / 500)],
        step_seconds=lambda: 0.01,
        until=lambda trainer: len(trainer.batches) >= killed_after,
    )
    left_over = {}
    for artifact in first.paths.batches_on_disk():
        with suppress(
            BatchError
        ):  # A thread of the killed orchestrator may still be deleting files covered by a checkpoint.
            left_over[artifact.step] = read_batch(artifact.path)
    second = await simulate(config, engines=[FakeEngine(lambda: rng.random() / 500)], number=2)
    assert second.code == exit_codes.OK
    base = second.trainer.attempt.base_step
    assert base <= killed_after
    lineage = first.groups[:base] + second.groups
    trained = [group for groups in lineage for group in groups]
    assert len(trained) == len(set(trained)) == 36
    assert set(range(36)) == set(trained)  # An uninterrupted run also trains the first 36 groups.
    taken_over = 0
    for batch in second.trainer.batches:
        old = left_over.get(batch.step)
        usable = old is not None and old.max_version <= base
        if usable and batch.step == base + 1 + taken_over:
            assert old is not None
            taken_over += 1
            assert [s.group for s in batch.samples] == [s.group for s in old.samples]
            assert all((a.input_ids == b.input_ids).all() for a, b in zip(batch.samples, old.samples, strict=True))
        for sample in batch.samples:
            assert int(sample.versions[sample.loss_mask].max()) <= batch.step - 1
    metrics = read_lines(second.paths.metrics)
    assert [line["step"] for line in metrics] == list(range(1, 10))
    assert {line["attempt"] for line in metrics if line["step"] > base} == {2}


async def test_checkpointed_batches_are_deleted_unless_recorded(tmp_path: Path, tokenizer_folder: Path) -> None:
    kept = await simulate(make_config(tmp_path / "a", tokenizer_folder, record_rollouts=True))
    assert [a.step for a in kept.paths.batches_on_disk()] == [1, 2, 3, 4, 5, 6]
    lean = await simulate(make_config(tmp_path / "b", tokenizer_folder))
    assert [a.step for a in lean.paths.batches_on_disk()] == [
        3,
        4,
        5,
        6,
    ]  # The oldest kept checkpoint is from step 2.


async def test_replay_trains_the_same_bytes(tmp_path: Path, tokenizer_folder: Path) -> None:
    recorded = await simulate(make_config(tmp_path / "a", tokenizer_folder, record_rollouts=True))
    config = make_config(tmp_path / "b", tokenizer_folder, replay=str(recorded.paths.rollouts))
    engine = FakeEngine()
    again = await simulate(config, engines=[engine])
    assert again.code == exit_codes.OK
    assert not engine.requests
    for old, new in zip(recorded.trainer.batches, again.trainer.batches, strict=True):
        for a, b in zip(old.samples, new.samples, strict=True):
            assert (a.input_ids == b.input_ids).all()
            assert (a.advantages == b.advantages).all()
            assert (a.versions == b.versions).all()


@dataclass
class UnevenEngine(FakeEngine):
    """Engine whose replies to one prompt in eight take longer than their staleness bound, the first time much longer."""

    long: set[tuple[int, ...]] = field(default_factory=set)

    async def generate(self, token_ids: Sequence[int], **options: Any) -> list[Completion]:  # type: ignore[override]
        if sum(token_ids) % 8 == 0:
            known, prompt = self.long, tuple(token_ids)
            seconds = 0.25 if prompt in known else 4.0
            known.add(prompt)
            await asyncio.sleep(seconds)
        return await super().generate(token_ids, **options)


async def test_long_replies_are_cancelled_at_most_once(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: Counter[int] = Counter()
    again = Ledger.dispatch_again

    def count(ledger: Ledger, group: int, reason: str) -> None:
        cancelled[group] += 1
        again(ledger, group, reason)

    monkeypatch.setattr(Ledger, "dispatch_again", count)
    algorithm = {"max_async_level": 1, "max_off_policy_steps": 2}
    config = make_config(tmp_path, tokenizer_folder, algorithm=algorithm, max_steps=30)
    outcome = await simulate(config, engines=[UnevenEngine()], step_seconds=lambda: 0.005)
    assert outcome.code == exit_codes.OK
    assert cancelled, "some were too slow"
    assert set(cancelled.values()) == {1}
    trained = {group for groups in outcome.groups for group in groups}
    assert trained >= set(range(max(trained) - 16)), "and all are trained, but for those of the last steps"
    for batch in outcome.trainer.batches:
        assert all(sample.dispatch_version >= batch.step - 1 - 2 for sample in batch.samples)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (2.0, 0.0)])
async def test_solved_reward_threshold_defines_solved_share(
    tmp_path: Path, tokenizer_folder: Path, threshold: float, share: float
) -> None:
    environments = [{"id": "reverse-text", "group_size": 2, "solved_reward": threshold}]
    config = make_config(
        tmp_path, tokenizer_folder, max_steps=1, environments=environments, evaluation={"num_tasks": 2}
    )
    outcome = await simulate(config)
    assert outcome.code == exit_codes.OK
    start, step = read_lines(outcome.paths.metrics)
    assert (step["batch/solve_all"], step["batch/solve_none"]) == (share, 1 - share)
    assert start["eval/reverse-text/pass@1"] == step["eval/reverse-text/pass@1"] == share
