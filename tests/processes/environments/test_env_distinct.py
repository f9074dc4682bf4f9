"""Distinct tasks: an environment with equal ids or tasks in both splits is refused at load."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import pytest

from rlrun.environments import EpisodeError, Reply, Score, Split, Task
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.user_code_check import check_subjects
from rlrun.environments.protocol import SingleTurnEnvironment
from rlrun.environments.registry import load_environment
from rlrun.environments.splits import DuplicateTaskError, GeneratedTasks, check_distinct, split_of
from rlrun.environments.stage import InProcessStage, TaskRef
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS

ENVIRONMENT = """
from rlrun.environments.protocol import Episode, Score, SingleTurnEnvironment, Task
class Fixed(SingleTurnEnvironment):
    id = "fixed"
    def __init__(self, train, held_out): self.own = {"train": train, "eval": held_out}
    def tasks(self, split): return [Task(id, [{"role": "user", "content": text}]) for id, text in self.own[split]]
    async def score(self, task, episode): return Score(1.0)
def make(train, held_out): return Fixed(train, held_out)
"""


def make_task(id: Any, text: str = "", answer: str | None = None, **info: Any) -> Task:
    return Task(id, [{"role": "user", "content": text or f"do {id}"}], answer, info)


def get_refusal(train: Sequence[Task], held_out: Sequence[Task]) -> str:
    with pytest.raises(DuplicateTaskError) as caught:
        check_distinct({"train": train, "eval": held_out})
    return str(caught.value)


def test_equal_ids_of_one_split_are_named_with_places() -> None:
    message = get_refusal([make_task("a"), make_task("b"), make_task("a", "other")], [make_task("c")])
    assert message == (
        "1 task of the train split shares its id with another task: 'a' (train[0], train[2]); "
        "give each task a different id"
    )
    assert "'c' (eval[0], eval[1])" in get_refusal([make_task("a")], [make_task("c"), make_task("c")])


@pytest.mark.parametrize("ids", [(1, "1"), ("x" * 150 + "1" + "x" * 100, "x" * 150 + "2" + "x" * 100)])
def test_ids_equal_in_files_are_refused(ids: tuple[Any, Any]) -> None:
    assert "shares its id with another task" in get_refusal([make_task(id) for id in ids], [])


def test_message_names_at_most_ten_shared_tasks() -> None:
    message = get_refusal([make_task(f"t{i}") for i in range(40)], [make_task(f"t{i}") for i in range(25)])
    assert message.startswith("the train and the eval split share 25 tasks: 't0' (train[0], eval[0]), ")
    assert "'t9'" in message
    assert "'t10'" not in message
    assert " and 15 more; " in message
    assert message.count("train[") == 10
    long = get_refusal([make_task("a") for _ in range(1000)], [])
    assert "'a' (train[0], train[1], train[2] and 997 more)" in long
    assert len(long) < 300


def test_equal_tasks_with_other_ids_are_shared() -> None:
    train = [make_task(f"train-{i}", f"what is {i}?", str(i)) for i in range(5)]
    message = get_refusal(train, [make_task("eval-0", "what is 9?", "9"), make_task("eval-1", "what is 3?", "3")])
    assert "share 1 task: 'eval-1' (eval[1], same content as 'train-3', train[3])" in message


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([make_task("a"), make_task("b")], [make_task("c")]),
        ([make_task("a", "q", "1"), make_task("b", "other")], [make_task("c", "q", "2")]),
        ([make_task("a", "q", seed=1), make_task("b", "other")], [make_task("c", "q", seed=2)]),
        # Only the id identifies the level: the content does not show that the tasks are equal.
        ([make_task(f"level-{i}", "play!") for i in range(9)], [make_task("level-9", "play!")]),
        ([make_task("train", "play!")], [make_task("eval", "play!")]),
        ([make_task("a"), make_task("b")], []),
        ([make_task("a", x=object()), make_task("b", x=object())], [make_task("c", x={1, 2})]),
    ],
)
def test_distinct_tasks_pass(train: list[Task], held_out: list[Task]) -> None:
    check_distinct({"train": train, "eval": held_out})
    check_distinct({"train": tuple(train), "eval": tuple(held_out)})


def make_command(train: list[list[str]], held_out: list[list[str]]) -> Command:
    return Command("fixed_tasks:make", {"train": train, "held_out": held_out})


def test_environment_process_refuses_shared_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixed_tasks.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", before(tmp_path))
    limits = Limits(start_seconds=UNREACHED_SECONDS)
    good = make_command([["a", "1"], ["b", "2"]], [["c", "3"]])
    twice, shared = (
        make_command([["a", "1"], ["a", "2"]], [["c", "3"]]),
        make_command([["a", "1"], ["b", "2"]], [["b", "3"]]),
    )
    passed, first, second = check_subjects([(command, limits) for command in (good, twice, shared)])
    assert passed is None
    assert first is not None
    assert "environment 'fixed_tasks:make': 1 task of the train split shares its id" in first.message
    assert second is not None
    assert "the train and the eval split share 1 task: 'b'" in second.message


def test_process_reports_notices_and_task_digest(tmp_path: Path) -> None:
    rows = [
        {"prompt": "", "ground_truth": "1"},
        *({"prompt": f"{i}?", "ground_truth": "1", "tools": [{}]} for i in range(30)),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = Command("dataset", {"path": str(tmp_path / "rows.jsonl"), "malformed": "Skip"})
    noticed: list[tuple[int, str]] = []
    assert check_subjects(
        [(command, Limits(start_seconds=UNREACHED_SECONDS))], lambda *notice: noticed.append(notice)
    ) == [None]
    assert [index for index, _ in noticed] == [0, 0]
    assert noticed[0][1].startswith("1 of 31 rows of ")
    assert noticed[1][1].startswith("the column 'tools' is ignored")

    async def start() -> str:
        stage = IsolatedEnvironment("rows", command, Limits(start_seconds=UNREACHED_SECONDS), [Log(None)])
        try:
            await stage.start()
            return stage.digest
        finally:
            stage.close()

    assert re.fullmatch("[0-9a-f]{16}", asyncio.run(start()))


class Lazy(Sequence[Task]):
    """Lazy sequence of tasks that the environment's code makes on access."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids, self.read = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Any:
        self.read += 1
        return make_task(self.ids[index])  # type: ignore[index]


async def test_lazy_ids_are_compared_at_play_time() -> None:
    own = {"train": Lazy(["a", "b", "a"]), "eval": Lazy(["b"])}

    class Odd(SingleTurnEnvironment):
        id = "odd"

        def tasks(self, split: Split) -> Sequence[Task]:
            return own[split]

        async def score(self, task: Task, episode: Any) -> Score:
            return Score(1.0)

    class Model:
        async def complete(self, messages: Any, **_: Any) -> Reply:
            return Reply("x")

    stage = InProcessStage(Odd())
    stage.check_tasks()
    assert own["train"].read == own["eval"].read == 0

    async def play(split: Split, index: int) -> str:
        ref = TaskRef(split, index)
        return (
            await stage.play(ref, Model(), timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)
        ).task_id

    assert [await play("train", 0), await play("train", 1), await play("train", 0)] == ["a", "b", "a"]
    for split, index, other in (("train", 2, "train[0]"), ("eval", 0, "train[1]")):
        with pytest.raises(EpisodeError, match=rf"{other[:5]}\[\d\] and {split}\[{index}\] have the same id") as caught:
            await play(split, index)  # type: ignore[arg-type]
        assert caught.value.kind == "environment"
        assert other in str(caught.value)


def test_generated_tasks_keep_their_ids() -> None:
    def tasks(make: Callable[[str, str], Task]) -> GeneratedTasks:
        return GeneratedTasks("train", count=4, seed=0, draw=lambda rng: str(rng.random()), make=make)

    assert len({made.id for made in tasks(make_task)}) == 4
    with pytest.raises(ValueError, match=r"make\(\) gave the task 'train-0-[0-9a-f]+' the id 'same'"):
        tasks(lambda id, problem: make_task("same"))[0]


# ---- rows of data files


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps({"reward_model": {"ground_truth": "1"}} | row) + "\n" for row in rows))


def load_tasks(folder: Path, **args: Any) -> dict[Split, Sequence[Task]]:
    split = {"train_split": "train", "eval_split": "test"}
    environment = load_environment("dataset", {"path": str(folder), "reward": "exact"} | split | args)
    return {"train": environment.tasks("train"), "eval": environment.tasks("eval")}


def test_rows_without_uid_are_distinct_in_both_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"prompt": f"{i}?"} for i in range(4)])
    write_rows(tmp_path / "test.jsonl", [{"prompt": f"{i} eval?"} for i in range(4)])
    splits = load_tasks(tmp_path)
    check_distinct(splits)
    assert [task.id for task in splits["train"]] == [f"train-{i}" for i in range(4)]
    assert [task.id for task in splits["eval"]] == [f"eval-{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (({"uid": 7, "prompt": "a"}, {"uid": "7", "prompt": "b"}), ({"prompt": "c"},), "'7' (train[0], train[1])"),
        (({"uid": "x", "prompt": "a"},), ({"uid": "x", "prompt": "c"},), "share 1 task: 'x' (train[0], eval[0])"),
        (({"prompt": "a"}, {"prompt": "a"}), ({"prompt": "a"},), "'eval-0' (eval[0], same content as 'train-0'"),
    ],
)
def test_duplicate_rows_are_refused(
    tmp_path: Path, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]], message: str
) -> None:
    write_rows(tmp_path / "train.jsonl", [*train, {"prompt": "another"}])
    write_rows(tmp_path / "test.jsonl", test)
    with pytest.raises(DuplicateTaskError) as caught:
        check_distinct(load_tasks(tmp_path))
    assert message in str(caught.value)


def test_single_shared_row_is_refused(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": "a"}])
    with pytest.raises(DuplicateTaskError, match=r"'eval-0' .*same content as 'train-0'"):
        check_distinct(load_tasks(tmp_path))


def test_shared_rows_are_excluded_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "train.jsonl", [{"prompt": text} for text in "abcab"])
    write_rows(tmp_path / "test.jsonl", [{"prompt": text} for text in "axc"])
    splits = load_tasks(tmp_path, leave_out_shared=True)
    check_distinct(splits)
    assert [task.id for task in splits["train"]] == ["train-1", "train-4"]
    assert "3 rows of the train split are left out" in capsys.readouterr().out
    write_rows(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="the eval split contains all prompts of the train split"):
        load_tasks(tmp_path, leave_out_shared=True)


def test_split_by_problem_needs_no_ids(tmp_path: Path) -> None:
    write_rows(tmp_path / "all.jsonl", [{"prompt": f"{i % 50}?"} for i in range(100)])
    splits = load_tasks(tmp_path, train_split=None, eval_split=None)
    check_distinct(splits)
    assert {split_of(json.dumps(made.prompt[0]["content"])) for made in splits["eval"]} == {"eval"}


def test_unreadable_task_is_skipped_by_check() -> None:
    class Rows(list[Task]):
        identified_by_content = False

        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise ValueError("unreadable")
            return make_task(index)

    check_distinct({"train": Rows([make_task(0)] * 3), "eval": []})


def test_check_of_endless_rows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rlrun.environments.splits.MAX_CHECKED_TASKS", 1000
    )  # The default limit runs the same loop for 3 s.

    class Endless:
        identified_by_content = False

        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> Task:
            self.read += 1
            return make_task(index)

    tasks = Endless()
    check_distinct({"train": tasks, "eval": []})  # type: ignore[dict-item]
    assert tasks.read == 1000
