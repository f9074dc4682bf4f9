"""Saved answers: complete answers are kept, missing ones are requested again, and failures are reported."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from rlrun.config.models.data import DataConfig, DataSetConfig, SourceConfig
from rlrun.config.models.rollout import CompleteSampling, EnvironmentConfig
from rlrun.environments.dataset_rows import Rows
from rlrun.environments.stage import TaskRef
from rlrun.evaluate import report, sampled_rows
from rlrun.evaluate.answers import AnswerFile, answer_fingerprint
from rlrun.evaluate.commands import Shown
from rlrun.evaluate.play import Part
from rlrun.evaluate.policies import Policy
from rlrun.local.summary import measures_table
from rlrun.orchestrator.evaluation.evaluator import Answer, Question, evaluation_metrics
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.sft.chat_rows import read_conversation
from rlrun.orchestrator.types import Recorded, Rollout
from rlrun.protocol.files.failures import RoleError
from tests.support.damage import damages

SOLVED = {"reverse-text": 1.0}
POLICY = Policy(10, "whole", Path("w"), "uid attempt 1")
ENVIRONMENT = EnvironmentConfig(id="reverse-text", args={"length": 4})
MESSAGES = ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "bä"})


def question(task: int, sample: int) -> Question:
    return Question(Arena(ENVIRONMENT, cast("Any", None), ()), TaskRef("eval", task), sample)


def rollout(reward: float, **changes: Any) -> Rollout:
    tokens = Recorded(
        np.arange(5, dtype=np.int32),
        np.array([False, False, True, True, True]),
        np.zeros(5, np.float32),
        np.zeros(5, np.int32),
    )
    return replace(
        Rollout((tokens,), reward, {"exact": reward}, messages=MESSAGES, texts=("bä",), task_id="t"), **changes
    )


def answer(reward: float | None, sample: int = 0, **changes: Any) -> Answer:
    made = None if reward is None else rollout(reward, **changes)
    return Answer("reverse-text", "t", sample, made, "" if made else "it timed out")


QUESTIONS = [question(task, sample) for task in range(2) for sample in range(2)]


def part(path: Path, answers: Sequence[Answer]) -> Part:
    file = AnswerFile(path)
    for asked, given in zip(QUESTIONS, answers, strict=False):
        file.add((asked, given))
    return Part(POLICY, "reverse-text", QUESTIONS, file)


def test_finished_answers_are_kept_with_same_metrics(tmp_path: Path) -> None:
    file, given = AnswerFile(tmp_path / "a" / "f.jsonl"), [answer(1.0), answer(0.5, 1), answer(None), answer(0.0, 1)]
    assert file.missing(QUESTIONS) == QUESTIONS
    for asked, found in zip(QUESTIONS, given, strict=True):
        file.add((asked, found))
    again = AnswerFile(file.path)
    assert again.missing(QUESTIONS) == [QUESTIONS[2]], "a failed one is tried again"
    assert again.first_error() == "it timed out"
    assert evaluation_metrics(again.answers(QUESTIONS), SOLVED) == evaluation_metrics(given, SOLVED)
    again.add((QUESTIONS[2], answer(1.0)))
    assert AnswerFile(file.path).missing(QUESTIONS) == []
    more = [*QUESTIONS, question(2, 0)]
    assert AnswerFile(file.path).missing(more) == more[4:], "more tasks ask only for these"


def test_torn_line_is_requested_again_without_other_loss(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "f.jsonl")
    file.add((QUESTIONS[0], answer(1.0)))
    whole = file.path.read_bytes()
    file.add((QUESTIONS[1], answer(0.5, 1)))
    for cut in (1, 30):
        file.path.write_bytes(whole + file.path.read_bytes()[len(whole) : -cut])
        torn = AnswerFile(file.path)
        assert torn.missing(QUESTIONS) == QUESTIONS[1:]
        torn.add((QUESTIONS[1], answer(0.5, 1)))
        assert AnswerFile(file.path).missing(QUESTIONS) == QUESTIONS[2:]


def test_damaged_lines_are_requested_again_without_other_loss(tmp_path: Path) -> None:
    written = part(tmp_path / "f.jsonl", [answer(1.0), answer(0.5, 1)]).file.path.read_bytes()
    for name, damaged in damages(written, every=7):
        path = tmp_path / "damaged.jsonl"
        path.write_bytes(damaged)
        file = AnswerFile(path)
        file.add((QUESTIONS[3], answer(0.0, 1)))
        known = AnswerFile(path)
        assert QUESTIONS[3] not in known.missing(QUESTIONS), name
        assert known.answers(QUESTIONS), name
        intact = [line for line in written.splitlines(keepends=True) if line in damaged.splitlines(keepends=True)]
        assert len(known.missing(QUESTIONS[:2])) <= 2 - len(intact), name


def test_answer_file_name_depends_on_all_inputs(tmp_path: Path) -> None:
    sampling = CompleteSampling(temperature=1.0, max_tokens=64)

    def name(
        policy: Policy = POLICY,
        environment: EnvironmentConfig = ENVIRONMENT,
        sampling: CompleteSampling = sampling,
        **other: Any,
    ) -> str:
        digest = answer_fingerprint(policy, environment, sampling, **{"seq_len": 64, "split": "eval"} | other)
        return str(AnswerFile.open_in(tmp_path, policy, environment, digest).path)

    same = [name(), name(environment=ENVIRONMENT.model_copy(update={"timeout_seconds": 5.0, "group_size": 4}))]
    others = [
        name(replace(POLICY, identity="uid attempt 2")),
        name(replace(POLICY, step=None)),
        name(environment=ENVIRONMENT.model_copy(update={"args": {"length": 5}})),
        name(environment=ENVIRONMENT.model_copy(update={"name": "reverse/text"})),
        name(sampling=sampling.model_copy(update={"temperature": 0.0})),
        name(sampling=sampling.model_copy(update={"top_k": 5})),
        name(seq_len=128),
        name(split="train"),
    ]
    assert len({*same}) == 1
    assert len({*same, *others}) == 1 + len(others)
    assert all(Path(path).is_relative_to(tmp_path) for path in others)


def test_table_has_a_row_per_policy_and_environment(tmp_path: Path) -> None:
    measured = evaluation_metrics([answer(1.0), answer(0.0, 1)], SOLVED)
    rows = [
        {"environment": "b", "policy": "base", "tasks": 1, "metrics": {"errors": 2.0}},
        {
            "environment": "a",
            "policy": "step 10",
            "tasks": 1,
            "metrics": {key.removeprefix("eval/reverse-text/"): value for key, value in measured.items()},
        },
    ]
    drawn = measures_table({"run": "r", "split": "eval", "samples_per_task": 2, "results": rows})
    assert [str(column.header) for column in drawn.columns] == [
        *("environment", "policy", "tasks", "avg@2", "pass@1", "pass@2", "tokens", "truncated", "errors")
    ]
    cells = [list(column.cells) for column in drawn.columns]
    assert cells[0] == ["a", "b"]
    assert [column[0] for column in cells[2:]] == ["1", "0.5000", "0.5000", "1.0000", "3.0", "0.00", "0"]
    assert [column[1] for column in cells[2:]] == ["1", "–", "–", "–", "–", "–", "2"]


def test_failed_answers_are_reported(tmp_path: Path) -> None:
    some = part(tmp_path / "some.jsonl", [answer(1.0), answer(None), answer(1.0), answer(None)])
    assert report.unanswered_lines([some]) == [
        "step 10, reverse-text: 2 of 4 answers failed; the first: it timed out",
    ]
    assert not report.nothing_answered([some])
    assert report.nothing_answered([some, part(tmp_path / "none.jsonl", [answer(None)] * 4)])


def test_rows_exclude_truncated_and_low_reward_answers(tmp_path: Path) -> None:
    found = part(tmp_path / "f.jsonl", [answer(1.0), answer(0.4, 1), answer(1.0, truncated=True), answer(None)])
    everything = sampled_rows.select_rows([found], min_reward=None)
    assert ([row["reward"] for row in everything.rows], everything.truncated, everything.below) == ([1.0, 0.4], 1, 0)
    good = sampled_rows.select_rows([found], min_reward=1.0)
    assert ([row["reward"] for row in good.rows], good.truncated, good.below) == ([1.0], 1, 1)
    assert good.rows[0] == {
        "messages": list(MESSAGES),
        "environment": "reverse-text",
        "task_id": "t",
        "sample": 0,
        "reward": 1.0,
        "policy": "step 10",
    }


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1\n\u2028ä"}],
    [
        {"role": "system", "content": "count"},
        {"role": "user", "content": "two?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "assistant", "content": "2"},
    ],
]


@pytest.mark.parametrize("suffix", sampled_rows.SUFFIXES)
def test_sft_reads_sampled_conversations_unchanged(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"data{suffix}"
    sampled_rows.check_output(path)
    sampled_rows.write_rows(path, [{"messages": chat, "reward": 1.0, "policy": "base"} for chat in CHATS])
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    rows = Rows(DataSetConfig(path=str(path)), "data")
    read = [
        read_conversation(rows.row(index), DataConfig(sources=[SourceConfig(path=str(path))])) for index in range(2)
    ]
    expected = json.loads(json.dumps(CHATS))
    expected[1][2]["tool_calls"][0]["function"]["arguments"] = {"n": 2}  # Chat templates expect an object.
    assert [list(chat.messages) for chat in read] == expected
    assert [list(chat.weights) for chat in read] == [[0, 1], [0, 0, 1, 0, 1]]
    with pytest.raises(RoleError, match="exists; choose another name"):
        sampled_rows.check_output(path)


def test_unsupported_output_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoleError, match=r"got data.csv; expected a name that ends in .jsonl or .parquet"):
        sampled_rows.check_output(tmp_path / "data.csv")
    mixed = [{"messages": [{"role": "user", "content": content}]} for content in ("text", ["parts"])]
    with pytest.raises(RoleError, match=r"do not fit the columns of a table .*; write .jsonl instead"):
        sampled_rows.write_rows(tmp_path / "data.parquet", mixed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_is_shown_only_on_terminals(terminal: bool) -> None:
    written = io.StringIO()
    with Shown(Console(file=written, force_terminal=terminal, width=100)) as shown:
        shown.answered()
        shown.expect(3)
        shown.answered()
        shown.answered()
        shown.tell("step [10]: answered")
    text = written.getvalue()
    assert "step [10]: answered\n" in text
    assert ("2/3" in text) == terminal
