"""Pure functions: staleness, sampler, ledger, batches, error budget, metrics and records."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrun.config.models.learning import AdvantageConfig, FilterConfig
from rlrun.environments.bounds import MAX_METRICS
from rlrun.orchestrator.aio.volume_access import BestEffortWriter
from rlrun.orchestrator.batches.assemble import assemble_batch, choose_first, choose_groups
from rlrun.orchestrator.evaluation.evaluator import Answer, evaluation_metrics, is_due
from rlrun.orchestrator.groups.filters import Rules
from rlrun.orchestrator.journal.ledger import Ledger, LedgerError
from rlrun.orchestrator.progress.metrics_file import MetricsFile, delete_old_traces, is_trace_old, version_spans
from rlrun.orchestrator.progress.step_metrics import OwnMetrics, batch_metrics, counter_metrics, group_metrics
from rlrun.orchestrator.rollouts.dispatcher import ErrorBudget
from rlrun.orchestrator.staleness import accepted_at_step, dispatch_capacity, oldest_version, split_by_age, too_old
from rlrun.orchestrator.tasks.curriculum import permute_position, share_out
from rlrun.orchestrator.tasks.sampler import Sampler, Source
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import FURTHEST, read_metrics
from rlrun.protocol.files.paths import RunPaths
from tests.support.damage import damages


def rollout(reward: float, tokens: int = 3, version: int = 0, sequences: int = 1) -> Rollout:
    mask = np.array([False] + [True] * tokens)
    recorded = Recorded(
        np.arange(tokens + 1, dtype=np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, version, -1).astype(np.int32),
    )
    return Rollout((recorded,) * sequences, reward, {"exact": reward}, truncated=reward < 0.5, seconds=2 * reward)


def group(
    number: int, rewards: list[float], *, version: int = 0, environment: str = "e", tokens: int = 3
) -> FinishedGroup:
    rollouts = tuple(rollout(reward, tokens, version) for reward in rewards)
    return FinishedGroup(number, environment, f"task-{number}", version, 1.0, rollouts)


def rules(advantage: AdvantageConfig) -> dict[str, Rules]:
    """Return the same rules for every environment."""
    own = Rules(advantage, FilterConfig(), max_tokens=16, vocabulary=100)
    return dict.fromkeys(("e", "a", "b"), own)


@pytest.mark.parametrize(
    ("running", "version", "accepted", "expected"),
    [
        (0, 0, 15, 17),  # the check value: C=20, B=8, k=3
        (0, 0, 0, 20),
        (20, 0, 0, 0),
        (0, 0, 32, 0),
        (0, 1, 32, 8),
        (0, 5, accepted_at_step(5, 8), 20),
    ],
)
def test_capacity_has_the_check_values(running: int, version: int, accepted: int, expected: int) -> None:
    found = dispatch_capacity(
        concurrency=20, running=running, max_async_level=3, version=version, batch_size=8, accepted=accepted
    )
    assert found == expected


def test_too_old_follows_oldest_allowed_version() -> None:
    assert oldest_version(12, 8) == 3
    assert not too_old(3, step=12, max_off_policy_steps=8)
    assert too_old(2, step=12, max_off_policy_steps=8)
    assert not too_old(11, step=12, max_off_policy_steps=0)
    assert too_old(10, step=12, max_off_policy_steps=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.text(max_size=5))
def test_epoch_visits_every_task_once(size: int, key: str) -> None:
    positions = range(min(size, 200))
    found = [permute_position(position, size, key) for position in positions]
    assert len(set(found)) == len(found)
    assert all(0 <= value < size for value in found)


def test_sampler_order_differs_by_epoch_and_seed() -> None:
    sampler = Sampler(3, [Source("a", 50)])
    epochs = [[sampler.draw(50 * epoch + i).task for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sampler.draw(120).epoch == 2
    assert [Sampler(4, [Source("a", 50)]).draw(i).task for i in range(50)] != epochs[0]


def test_sampler_supports_huge_task_list() -> None:
    sampler = Sampler(3, [Source("a", 10**12), Source("b", 7, 2.0)])
    assert 0 <= sampler.draw(10**9).task < 10**12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 200))
def test_environments_alternate_by_their_ratios(ratios: list[float], groups: int) -> None:
    sampler = Sampler(0, [Source(str(i), 1000, ratio) for i, ratio in enumerate(ratios)])
    counts = Counter(sampler.draw(g).environment for g in range(groups))
    for index, ratio in enumerate(ratios):
        assert abs(counts[index] - groups * ratio / sum(ratios)) <= len(ratios)


def test_share_out_counts_groups_within_environment() -> None:
    from fractions import Fraction

    weights = [Fraction(1), Fraction(3), Fraction(2)]
    seen: Counter[int] = Counter()
    for number in range(200):
        environment, index = share_out(number, weights)
        assert index == seen[environment]
        seen[environment] += 1


def test_ledger_keeps_group_open_until_batch_or_drop() -> None:
    ledger = Ledger()
    assert [ledger.take() for _ in range(4)] == [0, 1, 2, 3]
    ledger.dispatch_again(2, "age")
    ledger.dispatch_again(1, "engine")
    ledger.drop(0, "error")
    ledger.accept([3])
    assert ledger.state().open_groups == (1, 2)
    assert [ledger.take(), ledger.take(), ledger.take()] == [1, 2, 4]
    assert ledger.state().open_groups == (1, 2, 4)
    assert dict(ledger.counters) == {"cancelled/age": 1, "cancelled/engine": 1, "dropped/error": 1, "accepted": 1}


def test_restored_ledger_dispatches_open_groups_before_new_ones() -> None:
    ledger = Ledger()
    for _ in range(6):
        ledger.take()
    ledger.accept([0, 3])
    state = json.loads(json.dumps(ledger.state().__dict__))
    restored = Ledger.restore(type(ledger.state())(state["next_group"], tuple(state["open_groups"]), state["counters"]))
    restored.readmit([2, 7])  # 6 and 7 were dispatched after the checkpoint; 6 is dispatched again
    assert [restored.take() for _ in range(5)] == [1, 4, 5, 6, 8]
    with pytest.raises(LedgerError, match=r"\[0\]"):
        restored.readmit([0])
    with pytest.raises(LedgerError, match=r"\[2\]"):
        restored.readmit([2])


def test_groups_dropped_by_previous_attempt_are_not_sampled_again() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.take()
    ledger.accept([0])
    restored = Ledger.restore(ledger.state())
    restored.readmit([2, 4], {0: "masked", 1: "too_easy", 6: "error"})
    assert [restored.take() for _ in range(3)] == [3, 5, 7]
    assert dict(restored.counters) == {"accepted": 3, "dropped/too_easy": 1, "dropped/error": 1}


def test_batch_of_equal_groups_takes_first_finished_ones() -> None:
    groups = [group(number, [0.0, 1.0]) for number in (5, 2, 9, 1)]
    assert choose_groups(groups[:3], 8) is None
    chosen = choose_groups([*groups, group(7, [0.0, 1.0])], 8)
    assert chosen is not None
    assert [g.number for g in chosen] == [5, 2, 9, 1]


def test_mixed_group_sizes_fill_batch_exactly_if_possible() -> None:
    four, six = [0.0, 1.0] * 2, [0.0, 1.0] * 3
    exact = choose_groups([group(0, four), group(1, six), group(2, four), group(3, four)], 12)
    assert exact is not None
    assert [g.number for g in exact] == [0, 2, 3]
    larger = choose_groups([group(0, four), group(1, six), group(2, four)], 12)
    assert larger is not None
    assert [g.number for g in larger] == [0, 1, 2]
    assert choose_groups([group(0, four), group(1, six)], 12) is None


@given(st.lists(st.integers(1, 6), max_size=9), st.integers(1, 20))
def test_mixed_group_sizes_make_smallest_sufficient_batch(sizes: list[int], batch: int) -> None:
    groups = [group(number, [0.0] * size) for number, size in enumerate(sizes)]
    chosen = choose_groups(groups, batch)
    if sum(sizes) < batch:
        assert chosen is None
        return
    assert chosen is not None
    numbers = [found.number for found in chosen]
    assert numbers == sorted(set(numbers))
    exact = [
        max(picked)
        for count in range(1, len(sizes) + 1)
        for picked in combinations(range(len(sizes)), count)
        if sum(sizes[number] for number in picked) == batch
    ]
    if exact:
        assert sum(sizes[number] for number in numbers) == batch
        assert numbers[-1] == min(exact)
    else:
        assert numbers == list(range(len(numbers)))
        assert sum(sizes[: len(numbers) - 1]) < batch <= sum(sizes[: len(numbers)])


def test_choose_first_prefers_groups_that_expire_next() -> None:
    groups = [group(0, [0.0, 1.0], version=5), group(1, [0.0] * 6, version=4), group(2, [0.0, 1.0], version=3)]

    def chosen(size: int) -> list[int] | None:
        found = choose_first(groups, size, step=6, max_off_policy_steps=2)
        return None if found is None else [g.number for g in found]

    assert chosen(2) == [2]
    assert chosen(4) == [2, 0]
    assert chosen(8) == [2, 1]
    assert chosen(12) is None


def test_split_by_age_uses_age_at_training_step() -> None:
    groups = [group(0, [1.0], version=2), group(1, [1.0], version=3)]
    usable, expired = split_by_age(groups, step=6, max_off_policy_steps=2)
    assert [g.number for g in usable] == [1]
    assert [g.number for g in expired] == [0]


def test_advantages_are_per_group_and_only_on_sampled_tokens() -> None:
    groups = [group(4, [1.0, 0.0, 0.5]), group(9, [0.0, 1.0, 1.0])]
    batch = assemble_batch(groups, step=1, attempt=1, rules=rules(AdvantageConfig(name="grpo")))
    values = [float(s.advantages[s.loss_mask][0]) for s in batch.samples]
    np.testing.assert_allclose(values, [0.5, -0.5, 0, -2 / 3, 1 / 3, 1 / 3], atol=1e-6)
    assert all(s.advantages[0] == 0 for s in batch.samples)
    for sample in batch.samples:
        sample.check()


def test_batch_orders_groups_by_number() -> None:
    """The finish order depends on the engines; the bits of a step must not."""
    groups = [group(9, [0.0, 1.0]), group(4, [1.0, 0.0])]
    first, second = (
        assemble_batch(order, step=1, attempt=1, rules=rules(AdvantageConfig(name="grpo")))
        for order in (groups, groups[::-1])
    )
    assert [(s.group, s.rollout) for s in first.samples] == [(4, 0), (4, 1), (9, 0), (9, 1)]
    assert [(s.group, s.reward) for s in first.samples] == [(s.group, s.reward) for s in second.samples]


def test_length_baseline_uses_sampled_token_counts() -> None:
    lengths, rewards = [10, 20, 30], [1.0, 0.0, 0.5]
    rollouts = tuple(rollout(r, n) for r, n in zip(rewards, lengths, strict=True))
    groups = [FinishedGroup(0, "e", "t", 0, 1.0, rollouts)]
    batch = assemble_batch(groups, step=1, attempt=1, rules=rules(AdvantageConfig(name="opo")))
    values = [float(s.advantages[-1]) for s in batch.samples]
    np.testing.assert_allclose(values, [0.58333, -0.41667, 0.08333], atol=1e-4)


def test_branching_rollout_gives_samples_with_equal_advantage() -> None:
    rollouts = (rollout(1.0, sequences=3), rollout(0.0))
    batch = assemble_batch(
        [FinishedGroup(0, "e", "t", 0, 1.0, rollouts)], step=1, attempt=1, rules=rules(AdvantageConfig(name="grpo"))
    )
    assert [(s.rollout, float(s.advantages[-1])) for s in batch.samples] == [(0, 0.5), (0, 0.5), (0, 0.5), (1, -0.5)]
    assert batch_metrics(batch, {})["reward/mean"] == 0.5


def test_truncated_rollout_marks_only_its_last_sequence() -> None:
    cut = replace(rollout(1.0, sequences=3), finish_reason="length", truncated=True)
    resumed = replace(rollout(1.0), truncated=True)  # an earlier reply was cut, the last one was not
    groups = [FinishedGroup(0, "e", "t", 0, 1.0, (cut, rollout(0.0), resumed))]
    batch = assemble_batch(groups, step=1, attempt=1, rules=rules(AdvantageConfig(name="grpo")))
    assert [(s.rollout, s.truncated) for s in batch.samples] == [
        (0, False),
        (0, False),
        (0, True),
        (1, False),
        (2, False),
    ]


def test_whitening_counts_loss_tokens_of_several_turns_and_sequences() -> None:
    """Rewards 1 and 0 with 100 and 10 loss tokens give 0.315 and -3.148 for any split into turns and sequences.

    Tool results and tokens of masked rollouts do not count.
    """
    mask = np.array([False, *[True] * 4, *[False] * 70, *[True] * 6])
    recorded = Recorded(np.zeros(81, np.int32), mask, np.zeros(81, np.float32), np.where(mask, 0, -1).astype(np.int32))
    own = (rollout(1.0, 50, sequences=2), Rollout((recorded,), 0.0), rollout(0.25, 40))
    assert [r.loss_tokens for r in own] == [100, 10, 40]
    assert own[2].truncated
    rule = Rules(AdvantageConfig(name="reinforce_pp"), FilterConfig(overlong_mask=True), max_tokens=16, vocabulary=100)
    batch = assemble_batch([FinishedGroup(0, "e", "t", 0, 1.0, own)], step=1, attempt=1, rules={"e": rule})
    tokens = np.concatenate([s.advantages[s.loss_mask] for s in batch.samples])
    np.testing.assert_allclose(tokens, [0.314787] * 100 + [-3.147871] * 10, atol=2e-5)
    assert not any(s.advantages[~s.loss_mask].any() for s in batch.samples)


def test_discount_starts_at_rollout_end_across_sequences() -> None:
    config = AdvantageConfig(name="reinforce_pp", options={"gamma": 0.5, "adv_mean": "none", "adv_std": "none"})
    batch = assemble_batch(
        [FinishedGroup(0, "e", "t", 0, 1.0, (rollout(1.0, 2, sequences=2), rollout(3.0, 1)))],
        step=1,
        attempt=1,
        rules=rules(config),
    )
    assert [s.advantages[s.loss_mask].tolist() for s in batch.samples] == [[0.125, 0.25], [0.5, 1.0], [3.0]]


def test_error_budget_stops_run_when_errors_dominate() -> None:
    budget = ErrorBudget(0.5, batch_size=8)
    verdicts = []
    for i in range(60):
        budget.record("good")
        verdicts.append(budget.record("bad", f"boom {i}"))
    assert verdicts == [None] * 60  # exactly half is not more than half
    found = [budget.record("bad", "boom again") for _ in range(2)]
    assert found[-1] is not None
    assert "'bad'" in found[-1]
    assert "boom" in found[-1]


def test_errors_are_counted_over_the_last_rollouts_only() -> None:
    budget = ErrorBudget(0.5, batch_size=8)
    assert all(budget.record("e", "boom") is None for _ in range(50))
    assert all(budget.record("e") is None for _ in range(100))
    assert all(budget.record("e", "boom") is None for _ in range(50))
    assert budget.record("e", "boom") is not None


def test_environment_process_death_counts_as_one_error() -> None:
    budget = ErrorBudget(0.5, batch_size=8)
    for death in range(1, 6):  # each counts for a tenth of the window of 100
        assert all(budget.record("e", "boom", death=death) is None for _ in range(500))
    assert budget.record("e", "boom", death=6) is not None


def test_step_metrics_have_the_ecosystems_names_and_meanings() -> None:
    groups = [
        group(0, [1.0, 1.0], version=2, environment="a"),
        group(1, [0.0, 0.0], version=3, environment="b"),
        group(2, [1.0, 0.0], version=3, environment="b", tokens=9),
    ]
    batch = assemble_batch(groups, step=5, attempt=1, rules=rules(AdvantageConfig(name="grpo")))
    found = batch_metrics(batch, {"a": 1.0})  # a recorded batch may be of an environment that the run does not have
    assert found["reward/mean"] == 0.5
    assert found["reward/a/mean"] == 1.0
    assert found["reward/b/mean"] == 0.25
    assert found["batch/solve_all"] == pytest.approx(1 / 3)
    assert found["batch/solve_none"] == pytest.approx(1 / 3)
    shares = batch_metrics(batch, {"a": 1.5, "b": 0.0})
    assert (shares["batch/solve_all"], shares["batch/solve_none"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["off_policy/max"] == 2
    assert found["off_policy/mean"] == pytest.approx((6 * 2 + 24 * 1) / 30)
    assert found["completion_length/max"] == 9
    assert found["completion_length/mean"] == 5
    live = group_metrics(groups, OwnMetrics())
    assert live["batch/truncated"] == 0.5
    assert live["env/b/exact"] == 0.25
    assert counter_metrics({"errors": 5}, {"errors": 3})["errors"] == 2


def test_number_of_environment_metrics_is_bounded() -> None:
    own = OwnMetrics()
    assert own.means("a", [{"x": 1.0}, {"x": 2.0, "y": 4.0}]) == {"x": 1.5, "y": 4.0}
    seen: set[str] = set()
    for step in range(50):
        found = own.means("a", [{f"{step}-{i}": 1.0 for i in range(MAX_METRICS)} | {"x": 7.0}])
        assert found["x"] == 7.0, "a name that came early stays"
        seen |= found.keys()
    assert len(seen - {"left_out"}) <= MAX_METRICS
    assert found["left_out"] == MAX_METRICS
    assert own.means("b", [{"z": 1.0}]) == {"z": 1.0}


@pytest.mark.parametrize(("version", "expected"), [(0, True), (1, False), (3, True), (10, True), (9, True), (8, False)])
def test_evaluation_is_due_at_first_interval_and_last_version(version: int, expected: bool) -> None:
    from rlrun.config.models.rollout import EvaluationConfig

    assert is_due(version, EvaluationConfig(interval=3), max_steps=10) is expected
    assert not is_due(version, None, max_steps=10)


def test_evaluation_averages_samples_then_tasks_without_failures() -> None:
    answers = [
        Answer("e", "t1", 0, rollout(1.0)),
        Answer("e", "t1", 1, rollout(0.0)),
        Answer("e", "t2", 0, rollout(1.0)),
        Answer("e", "t2", 1, None),
    ]
    found = evaluation_metrics(answers, {"e": 1.0})
    assert found["eval/e/reward/mean"] == 0.75
    assert found["eval/e/reward/mean_all"] == 0.5
    assert found["eval/e/errors"] == 1
    assert found["eval/e/pass@1"] == 0.75
    assert "eval/e/pass@2" not in found  # one task has only one answer
    assert evaluation_metrics(answers, {"e": 0.0})["eval/e/pass@1"] == 1.0
    nothing = evaluation_metrics([Answer("e", "t1", 0, None, late=True)], {"e": 1.0})
    assert (nothing["eval/e/reward/mean_all"], nothing["eval/e/timeouts"]) == (0.0, 1.0)
    assert "eval/e/reward/mean" not in nothing


def metrics_file(path: Path, base: int, unwritten: list[dict[str, object]] | None = None) -> MetricsFile:
    return MetricsFile(
        path,
        attempt=2,
        base_step=base,
        unwritten=unwritten or [],
        evaluated=lambda version: version % 2 == 0,
        writer=WRITER,
    )


WRITER = BestEffortWriter()


def wait_for_writer() -> None:
    """Wait until the writer has executed all earlier writes."""
    written = threading.Event()
    WRITER.write("nothing", written.set, keep=True)
    assert written.wait(60)


def steps_in(path: Path) -> list[int]:
    wait_for_writer()
    return [line["step"] for line in read_metrics(path)[0]]


def test_lines_wait_for_their_evaluation_and_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = metrics_file(path, 0)
    for step in (1, 2, 3):
        file.add(step, "batch", {"reward/mean": float(step)})
        file.add(step, "trained", {"loss": 1.0})
    assert steps_in(path) == []
    file.add(0, "evaluation", {"eval/e/reward/mean": 0.5})
    assert steps_in(path) == [0, 1]
    assert [line["step"] for line in file.unwritten(2)] == [2]
    file.add(2, "evaluation", {})
    assert steps_in(path) == [0, 1, 2, 3]
    assert file.pending() == []


def test_damaged_lines_are_kept_apart_and_end_no_attempt(tmp_path: Path) -> None:
    originals = [{"step": step, "attempt": 1, "loss": 0.5} for step in (1, 2, 3)]
    content = "".join(json.dumps(line) + "\n" for line in originals).encode()
    for number, (name, damaged) in enumerate(damages(content, every=3)):
        path = tmp_path / str(number) / "metrics.jsonl"
        path.parent.mkdir()
        path.write_bytes(damaged)
        _, unread = read_metrics(path)
        metrics_file(path, 3)
        wait_for_writer()
        intact = [line for line in originals if json.dumps(line).encode() + b"\n" in damaged.splitlines(keepends=True)]
        left = read_metrics(path)
        assert [line for line in intact if line not in left[0]] == [], name
        assert left[1] == [], name
        kept = path.with_name("metrics.damaged.a0002.jsonl")
        assert (kept.read_bytes().splitlines() if kept.exists() else []) == b"\n".join(unread).splitlines(), name


def test_retrained_steps_are_marked_and_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    counts = {"batch/tokens": 100.0, "batch/samples": 4.0}
    path.write_text("".join(json.dumps({"step": s, "attempt": 1} | counts) + "\n" for s in range(1, 6)))
    file = metrics_file(path, 3)
    assert (file.tokens, file.samples) == (300, 12), "of steps 1 to 3, which stand"
    for step in (4, 5, 6):
        file.add(step, "batch", counts)
        file.add(step, "trained", {})
        if step % 2 == 0:
            file.add(step, "evaluation", {})
    wait_for_writer()
    assert [line.get(FURTHEST) for line in read_metrics(path)[0]] == [None, None, None, 5, 5, None]
    assert (file.tokens, file.samples) == (600, 24)
    file = metrics_file(path, 4)
    file.add(5, "batch", counts)
    file.add(5, "trained", {})
    assert steps_in(path)[-1] == 5
    assert read_metrics(path)[0][-1][FURTHEST] == 6, "also what the last but one has reached"


def test_lines_of_lost_steps_are_removed_and_others_restored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "attempt": 1}) + "\n" for s in range(6)) + '{"step": 6, "att')
    file = metrics_file(path, 3)
    assert steps_in(path) == [0, 1, 2, 3]
    assert not file.wants_base
    path.write_text('{"step": 0}\n{"step": 1}\n')
    waiting = metrics_file(path, 4, [{"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.0}, {"step": 4, "loss": 1.0}])
    assert steps_in(path) == [0, 1, 2, 3]
    assert waiting.wants_base
    waiting.add(4, "evaluation", {"eval/e/reward/mean": 1.0})
    wait_for_writer()
    assert read_metrics(path)[0][-1]["loss"] == 1.0


def test_superseded_attempt_writes_no_metrics_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = metrics_file(path, 0, [{"step": 0, "loss": 1.0}])
    file.add(0, "evaluation", {})
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "0002.json").touch()
    file.add(1, "batch", {})
    file.add(1, "trained", {})
    assert steps_in(path) == [0, 1]
    (tmp_path / "attempts" / "0003.json").touch()
    for part in ("batch", "evaluation", "trained"):
        file.add(2, part, {})
    assert steps_in(path) == [0, 1]
    file.add(3, "batch", {})
    with pytest.raises(RoleError, match="attempt 3 of this run has started, so attempt 2 is over"):
        file.add(3, "trained", {})


def test_version_spans_cover_token_positions() -> None:
    assert version_spans([-1, -1, 3, 3, 4, -1, 5]) == [
        {"version": 3, "start": 2, "end": 4},
        {"version": 4, "start": 4, "end": 5},
        {"version": 5, "start": 6, "end": 7},
    ]


def test_metrics_file_start_needs_memory_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {f"metric/{number}": float(number) for number in range(100)}
    with path.open("w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"step": step, "attempt": 1, "batch/tokens": 2} | line) + "\n")
    writer = BestEffortWriter()
    tracemalloc.start()
    metrics = MetricsFile(path, attempt=2, base_step=999, unwritten=[], evaluated=lambda version: False, writer=writer)
    while writer._thread.is_alive():  # a close gives a busy machine five seconds
        writer.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3, "all lines were held"
    assert (metrics.tokens, metrics.last["step"]) == (2 * 999, 999)
    assert [line["step"] for line in read_metrics(path)[0]] == list(range(1, 1000))


def test_old_traces_are_deleted_but_for_each_hundredth(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.traces.mkdir()
    for step in range(1, 351):
        paths.trace(step).touch()
    paths.evaluation_trace(10).touch()
    delete_old_traces(paths, newest=350, keep=30)
    assert paths.traced_steps() == [100, 200, 300, *range(321, 351)]
    assert paths.evaluation_trace(10).exists()
    assert [step for step in range(352) if is_trace_old(step, newest=351, keep=30)][-1] == 321
