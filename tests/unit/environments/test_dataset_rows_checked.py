"""Validation of `dataset` rows before the run starts: invalid rows are refused or skipped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import EnvironmentLoadError, load_environment
from rlrun.environments.protocol import Episode, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.rewards.mathematics import TruthError, truth_text
from rlrun.environments.rewards.weighted_rewards import RowTask
from rlrun.environments.splits import PromptError
from rlrun.environments.stage import InProcessStage

GOOD = [{"prompt": f"What is {i}+1?", "ground_truth": str(i + 1)} for i in range(40)]
JUDGE = {"reward": "judge", "reward_args": {"base_url": "http://judge/v1", "model": "m"}}


def write(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(folder / "rows.jsonl")}


@pytest.mark.parametrize(
    ("truth", "reward", "says"),
    [
        ({"target": ["Author 3"]}, "math", 'ground_truth is {"target": ["Author 3"]}, but the reward math compares'),
        (["3"], "math", 'ground_truth is ["3"]'),
        (None, "math", "ground_truth is null"),
        (True, "math", "ground_truth is true"),
        ("  ", "math", 'ground_truth is "  "'),
        ({"target": "a"}, "exact", "but the reward exact compares texts"),
        (None, "exact", "ground_truth is null"),
        (None, "code", "the ground truth contains no test cases"),
        ([], "code", "ground_truth has no test case"),
        ("a\ud800", "exact", "ground_truth contains a lone surrogate at character 1"),
    ],
)
def test_ground_truth_of_unsupported_type_is_refused(truth: object, reward: str, says: str, tmp_path: Path) -> None:
    good = {"code": '[{"stdin": "", "stdout": ""}]'}.get(reward, "1")
    rows = [row | {"ground_truth": good} for row in GOOD] + [GOOD[0] | {"ground_truth": truth}]
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment("dataset", write(tmp_path, rows) | {"reward": reward})
    assert says in str(caught.value)
    assert "rows.jsonl line 41" in str(caught.value)


def test_rows_with_one_fault_share_one_message_with_fix(tmp_path: Path) -> None:
    rows = [GOOD[i] | {"ground_truth": {"target": [f"Author {i}"]}} for i in range(6)]
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment("dataset", write(tmp_path, [*GOOD, *rows]))
    message = str(caught.value)
    assert 'rows.jsonl line 41, rows.jsonl line 42, rows.jsonl line 43 and 3 more: ground_truth is {"target"' in message
    assert "or set args.malformed to Skip" in message


@pytest.mark.parametrize("truth", [None, ["a", "b"], {"target": ["a"]}, 3, True])
def test_judge_and_custom_functions_accept_any_ground_truth(truth: object, tmp_path: Path) -> None:
    rows = [row | {"ground_truth": truth} for row in GOOD]
    task = load_environment("dataset", write(tmp_path, rows) | JUDGE).tasks("train")[0]
    assert isinstance(task, RowTask)
    assert task.truth == truth
    assert task.answer == (None if truth is None else json.dumps(truth))


@pytest.mark.parametrize(("truth", "text"), [(3, "3"), (-2.5, "-2.5"), (1e-05, "1e-05"), ("x+1", "x+1")])
def test_numbers_and_texts_are_expressions(truth: object, text: str) -> None:
    assert truth_text(truth) == text


@pytest.mark.parametrize("truth", [float("nan"), float("inf"), b"1"])
def test_value_that_is_not_a_number_is_refused(truth: object) -> None:
    with pytest.raises(TruthError, match="write it as a number or a text"):
        truth_text(truth)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": 5}, "prompt is neither a text nor a list of messages"),
        ({"prompt": "a\ud800"}, "prompt[0].content contains a lone surrogate at character 1"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "prompt[0].content[0] has content of type 'image'",
        ),
        ({"images": [{"bytes": "..."}]}, "the column 'images' is not empty"),
    ],
)
def test_invalid_prompt_is_refused_or_skipped(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    args = write(tmp_path, [GOOD[0] | row, *GOOD])
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment("dataset", args)
    assert f"rows.jsonl line 1: {says}" in str(caught.value)
    environment = load_environment("dataset", args | {"malformed": "Skip"})
    assert sum(len(environment.tasks(split)) for split in ("train", "eval")) == len(GOOD)
    (notice,) = InProcessStage(environment).notices
    assert notice.startswith(f"1 of 41 rows of {args['path']} are left out as malformed: rows.jsonl line 1: {says}")


def test_dataset_without_usable_rows_is_refused_despite_skip(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match=r"line 1, rows\.jsonl line 2: the prompt is empty"):
        load_environment("dataset", write(tmp_path, [{"prompt": "", "ground_truth": "1"}] * 2) | {"malformed": "Skip"})


def test_content_parts_become_prompt_text(tmp_path: Path) -> None:
    rows = [row | {"prompt": [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]} for row in GOOD]
    tasks = load_environment("dataset", write(tmp_path, rows) | {"instruction": "Box it."}).tasks("train")
    asked = {task.prompt[0]["content"] for task in tasks}
    assert asked <= {f"{row['prompt']}\n\nBox it." for row in GOOD}


def test_tool_and_agent_columns_are_reported_once(tmp_path: Path) -> None:
    rows = [row | {"agent_name": "tool_agent", "extra_info": {"tools_kwargs": {"calc": {}}}} for row in GOOD]
    notices = InProcessStage(load_environment("dataset", write(tmp_path, rows))).notices
    assert [notice.split("'")[1] for notice in notices] == ["agent_name", "extra_info.tools_kwargs"]


def test_ignored_image_column_is_reported_once(tmp_path: Path) -> None:
    rows = [{"images": [{"bytes": "..."}], "problem": f"<image>Find {i}.", "answer": "3"} for i in range(40)]
    notices = InProcessStage(load_environment("dataset", write(tmp_path, rows) | {"layout": "geometry3k"})).notices
    assert notices == ["the column 'images' is ignored: this environment offers neither tools nor images"]


class Questions(SingleTurnEnvironment):
    """User environment with single-turn prompts."""

    id = "questions"

    def __init__(self, *prompts: list[dict[str, Any]]) -> None:
        self.prompts = prompts

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}-{i}", prompt) for i, prompt in enumerate(self.prompts)] if split == "train" else []

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(0.0)


@pytest.mark.parametrize(("content", "says"), [("", "the prompt is empty"), ("\udc00", "contains a lone surrogate")])
def test_custom_environment_prompt_is_checked_at_load(content: str, says: str) -> None:
    good = [{"role": "user", "content": "?"}]
    InProcessStage(Questions(good)).check_tasks()
    with pytest.raises(PromptError, match=rf"1 task cannot be played: 'train-1' \(train\[1\]\): .*{says}"):
        InProcessStage(Questions(good, [{"role": "user", "content": content}])).check_tasks()
