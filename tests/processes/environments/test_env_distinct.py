"""Distinct tasks: equal ids and tasks of both splits are refused by name when an environment is loaded."""

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
from rlrun.environments.splits import GeneratedTasks, SharedTaskError, check_distinct, split_of
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


def task(id: Any, text: str = "", answer: str | None = None, **info: Any) -> Task:
    return Task(id, [{"role": "user", "content": text or f"do {id}"}], answer, info)


def refused(train: Sequence[Task], held_out: Sequence[Task]) -> str:
    with pytest.raises(SharedTaskError) as caught:
        check_distinct({"train": train, "eval": held_out})
    return str(caught.value)


def test_equal_ids_of_one_split_are_named_with_their_places() -> None:
    message = refused([task("a"), task("b"), task("a", "other")], [task("c")])
    assert message == (
        "1 task of the train split shares its id with another task: 'a' (train[0], train[2]); "
        "give each task a different id"
    )
    assert "'c' (eval[0], eval[1])" in refused([task("a")], [task("c"), task("c")])


@pytest.mark.parametrize("ids", [(1, "1"), ("x" * 150 + "1" + "x" * 100, "x" * 150 + "2" + "x" * 100)])
def test_ids_that_are_equal_in_files_are_equal(ids: tuple[Any, Any]) -> None:
    assert "shares its id with another task" in refused([task(id) for id in ids], [])


def test_at_most_ten_are_named() -> None:
    message = refused([task(f"t{i}") for i in range(40)], [task(f"t{i}") for i in range(25)])
    assert message.startswith("the train and the eval split share 25 tasks: 't0' (train[0], eval[0]), ")
    assert "'t9'" in message
    assert "'t10'" not in message
    assert " and 15 more; " in message
    assert message.count("train[") == 10
    long = refused([task("a") for _ in range(1000)], [])
    assert "'a' (train[0], train[1], train[2] and 997 more)" in long
    assert len(long) < 300


def test_tasks_that_ask_the_same_under_other_ids_are_shared() -> None:
    train = [task(f"train-{i}", f"what is {i}?", str(i)) for i in range(5)]
    message = refused(train, [task("eval-0", "what is 9?", "9"), task("eval-1", "what is 3?", "3")])
    assert "share 1 task: 'eval-1' (eval[1], same content as 'train-3', train[3])" in message


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([task("a"), task("b")], [task("c")]),
        ([task("a", "q", "1"), task("b", "other")], [task("c", "q", "2")]),
        ([task("a", "q", seed=1), task("b", "other")], [task("c", "q", seed=2)]),
        # The id alone tells which level it is: nothing says that one of eval is one of train.
        ([task(f"level-{i}", "play!") for i in range(9)], [task("level-9", "play!")]),
        ([task("train", "play!")], [task("eval", "play!")]),
        ([task("a"), task("b")], []),
        ([task("a", x=object()), task("b", x=object())], [task("c", x={1, 2})]),
    ],
)
def test_distinct_tasks_pass(train: list[Task], held_out: list[Task]) -> None:
    check_distinct({"train": train, "eval": held_out})
    check_distinct({"train": tuple(train), "eval": tuple(held_out)})


def fixed(train: list[list[str]], held_out: list[list[str]]) -> Command:
    return Command("fixed_tasks:make", {"train": train, "held_out": held_out})


def test_the_environment_s_own_process_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixed_tasks.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", before(tmp_path))
    limits = Limits(start_seconds=UNREACHED_SECONDS)
    good = fixed([["a", "1"], ["b", "2"]], [["c", "3"]])
    twice, shared = fixed([["a", "1"], ["a", "2"]], [["c", "3"]]), fixed([["a", "1"], ["b", "2"]], [["b", "3"]])
    passed, first, second = check_subjects([(command, limits) for command in (good, twice, shared)])
    assert passed is None
    assert first is not None
    assert "environment 'fixed_tasks:make': 1 task of the train split shares its id" in first.message
    assert second is not None
    assert "the train and the eval split share 1 task: 'b'" in second.message


def test_process_reports_notices_and_the_digest_of_the_tasks(tmp_path: Path) -> None:
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
    """Tasks that the environment's code makes when it is asked."""

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
        return task(self.ids[index])  # type: ignore[index]


async def test_ids_of_a_lazy_sequence_are_compared_as_they_are_played() -> None:
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

    assert len({made.id for made in tasks(task)}) == 4
    with pytest.raises(ValueError, match=r"make\(\) gave the task 'train-0-[0-9a-f]+' the id 'same'"):
        tasks(lambda id, problem: task("same"))[0]


# ---- rows of data files


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps({"reward_model": {"ground_truth": "1"}} | row) + "\n" for row in rows))


def tasks_of(folder: Path, **args: Any) -> dict[Split, Sequence[Task]]:
    split = {"train_split": "train", "eval_split": "test"}
    environment = load_environment("dataset", {"path": str(folder), "reward": "exact"} | split | args)
    return {"train": environment.tasks("train"), "eval": environment.tasks("eval")}


def test_rows_without_a_uid_are_distinct_in_both_files(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": f"{i}?"} for i in range(4)])
    write(tmp_path / "test.jsonl", [{"prompt": f"{i} eval?"} for i in range(4)])
    splits = tasks_of(tmp_path)
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
def test_rows_that_are_not_distinct_are_refused(
    tmp_path: Path, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]], message: str
) -> None:
    write(tmp_path / "train.jsonl", [*train, {"prompt": "another"}])
    write(tmp_path / "test.jsonl", test)
    with pytest.raises(SharedTaskError) as caught:
        check_distinct(tasks_of(tmp_path))
    assert message in str(caught.value)


def test_a_single_row_is_shared_too(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", [{"prompt": "a"}])
    with pytest.raises(SharedTaskError, match=r"'eval-0' .*same content as 'train-0'"):
        check_distinct(tasks_of(tmp_path))


def test_shared_rows_are_left_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": text} for text in "abcab"])
    write(tmp_path / "test.jsonl", [{"prompt": text} for text in "axc"])
    splits = tasks_of(tmp_path, leave_out_shared=True)
    check_distinct(splits)
    assert [task.id for task in splits["train"]] == ["train-1", "train-4"]
    assert "3 rows of the train split are left out" in capsys.readouterr().out
    write(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="the eval split contains all prompts of the train split"):
        tasks_of(tmp_path, leave_out_shared=True)


def test_a_split_by_problem_needs_no_ids(tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl", [{"prompt": f"{i % 50}?"} for i in range(100)])
    splits = tasks_of(tmp_path, train_split=None, eval_split=None)
    check_distinct(splits)
    assert {split_of(json.dumps(made.prompt[0]["content"])) for made in splits["eval"]} == {"eval"}


def test_task_that_cannot_be_read_is_passed_over() -> None:
    class Rows(list[Task]):
        identified_by_content = False

        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise ValueError("unreadable")
            return task(index)

    check_distinct({"train": Rows([task(0)] * 3), "eval": []})


def test_the_check_of_endless_rows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun.environments.splits.CHECKED", 1000)  # the default is the same loop for 3 s

    class Endless:
        identified_by_content = False

        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> Task:
            self.read += 1
            return task(index)

    tasks = Endless()
    check_distinct({"train": tasks, "eval": []})  # type: ignore[dict-item]
    assert tasks.read == 1000
