"""Identity of tasks: equal rows of verifiers 0.1, and the digest that recognizes another data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import load_environment
from rlrun.environments.adapters.verifiers_legacy import task_digests
from rlrun.environments.protocol import Task
from rlrun.environments.splits import check_distinct


def task(number: int, prompt: str, answer: str | None, row: str = "") -> Task:
    return Task(f"train-{number}", [{"role": "user", "content": prompt}], answer, {"row": row or f"{number}"})


def distinct(tasks: Sequence[Task]) -> int:
    return len(set(task_digests(tasks).values()))


def test_equal_prompts_with_other_answers_are_different_tasks() -> None:
    assert distinct([task(i, "guess", str(i)) for i in range(20)]) == 20
    assert distinct([task(i, "guess", str(i % 5)) for i in range(20)]) == 5
    assert distinct([*(task(i, "guess", str(i)) for i in range(4)), task(4, "say 4", "4"), task(5, "say 4", "4")]) == 5


def test_rows_that_differ_only_in_hidden_column_are_different() -> None:
    assert distinct([task(i, "guess", None) for i in range(20)]) == 20
    assert distinct([task(i, "guess", None, row="same") for i in range(20)]) == 1


def test_equal_questions_stay_in_one_split() -> None:
    """An index in another column must not put copies of a question into both splits."""
    tasks = [task(i, f"say {i % 5}", f"{i % 5}") for i in range(20)]
    assert distinct(tasks) == 5
    # The held-out rows must be the same as in earlier releases.
    assert set(task_digests(tasks[:5]).values()) == set(
        task_digests([replace(t, info={"row": "x"}) for t in tasks[:5]]).values()
    )


def rows(path: Path, *answers: str) -> dict[str, Any]:
    path.mkdir()
    for split in ("train", "test"):
        lines = [{"prompt": f"{split} {i}?", "ground_truth": answer} for i, answer in enumerate(answers)]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"path": str(path), "train_split": "train", "eval_split": "test"}


def digest(id: str, args: dict[str, Any]) -> str:
    environment = load_environment(id, args)
    return check_distinct({"train": environment.tasks("train"), "eval": environment.tasks("eval")})["train"]


def test_digest_distinguishes_data_sets(tmp_path: Path) -> None:
    first = digest("dataset", rows(tmp_path / "a", "1", "2"))
    assert first == digest("dataset", rows(tmp_path / "b", "1", "2"))
    assert first != digest("dataset", rows(tmp_path / "c", "1", "3"))
    assert first != digest("dataset", rows(tmp_path / "d", "1", "2", "3"))


@pytest.mark.parametrize("args", [{"seed": 1}, {"num_tasks": 9_999}, {"length": 3}])
def test_digest_of_generated_tasks_depends_on_arguments(args: dict[str, Any]) -> None:
    assert digest("reverse-text", {}) == digest("reverse-text", {})
    assert digest("reverse-text", {}) != digest("reverse-text", args)


def test_digest_ignores_scoring_data_of_one_process() -> None:
    tasks = [task(i, f"say {i}", str(i)) for i in range(3)]
    others = [replace(one, info={"folder": "/tmp/other"}) for one in tasks]
    assert check_distinct({"train": tasks, "eval": []}) == check_distinct({"train": others, "eval": []})
