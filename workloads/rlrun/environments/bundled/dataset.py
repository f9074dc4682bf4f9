"""`dataset` and `gsm8k`: one prompt a row, one reply, and a reward that compares it with the row's answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlrun.config.models.data import DataSetConfig
from rlrun.environments.bundled.word_problems import PROBLEMS
from rlrun.environments.dataset_rows import Rows, download
from rlrun.environments.distinct import CHECKED
from rlrun.environments.layouts import LAYOUTS, LayoutName, convert, final_answer, no_prompt
from rlrun.environments.protocol import Episode, Message, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.rewards.entries import ANY_SOURCE, RewardEntries, RewardEntry
from rlrun.environments.rewards.mixture import Rewards, RowTask
from rlrun.environments.rewards.scorers import scorer
from rlrun.environments.splits import EmptySplitError, split_of


class RowTasks(Sequence[Task]):
    """Tasks made from rows when they are asked for.

    Args:
        rows: of the files.
        positions: of the rows that are in this split.
        make: a task from an id, which a row may replace by its own, and a row.
        split: whose tasks these are; begins the ids.
    """

    identified_by_content = True

    def __init__(self, rows: Rows, positions: Sequence[int], make: Make, split: Split) -> None:
        self._rows, self._positions, self._make, self._split = rows, positions, make, split

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = self._positions[index]
        try:
            task = self._make(f"{self._split}-{position}", self._rows.row(position))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._rows.place(position)}: {error}") from error
        return task

    def check(self, check: Callable[[Mapping[str, object]], None], split: Split) -> None:
        """Hold the rows of this split (the first 200,000) against what the rewards need.

        Raises:
            ValueError: rows are refused; names their number, the first ones and the reason of each.
        """
        refused: dict[str, list[str]] = {}
        for index in range(min(len(self), CHECKED)):
            task = self[index]
            assert isinstance(task, RowTask)
            try:
                check(task.row)
            except ValueError as error:
                refused.setdefault(str(error), []).append(self._rows.place(self._positions[index]))
        if refused:
            raise ValueError(
                f"{split} split: "
                + "; ".join(f"{_places(places)}: {reason}" for reason, places in list(refused.items())[:MAX_NAMED])
            )


def _places(places: Sequence[str]) -> str:
    shown = ", ".join(places[:3])
    return shown if len(places) <= 3 else f"{shown} and {len(places) - 3} more"


Make = Callable[[str, Mapping[str, object]], Task]
Problem = Callable[[Mapping[str, object]], str]
MAX_NAMED = 5
"""Rows that one message names."""


class DatasetArgs(BaseModel):
    """Arguments of `dataset`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = None
    """A `.parquet`, `.jsonl` or `.csv` file, or a folder of such."""
    name: str | None = None
    """Instead of `path`: a data set on the hub with such files."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Default: the main branch."""
    subset: str | None = None
    """Folder within it."""
    train_split: str | None = None
    """Files of the train split have this word in their name. Default: all rows, one problem in eight held out."""
    eval_split: str | None = None
    """The same of the eval split."""
    leave_out_shared: bool = False
    """Rows of the train split whose prompt the eval split has as well are left out instead of refused."""
    layout: LayoutName | None = None
    """The files are those of a public set, whose rows are turned into this environment's."""
    unique: bool | None = None
    """Rows whose prompt an earlier row has are left out. Default: for layouts whose set holds its rows several times."""
    reward: RewardEntries = Field(default="math", validate_default=True)
    """Reward of a reply: a built-in reward, `package.module:function`, or a list of `{name, weight, args}`."""
    reward_args: dict[str, object] = Field(default_factory=dict)
    """Options of a single reward."""
    reward_by_source: dict[str, RewardEntries] = Field(default_factory=dict)
    """Instead of `reward`: rewards by the column `data_source`; `*` is for all others."""
    system_prompt: str | None = None
    """Put before prompts that have none."""
    instruction: str | None = None
    """Follows the user's last message, after an empty line."""

    @model_validator(mode="after")
    def _consistent(self) -> DatasetArgs:
        if (self.path is None) == (self.name is None):
            raise ValueError("exactly one of path and name says where the data is")
        if self.revision is not None and self.name is None:
            raise ValueError(f"revision ({self.revision}) needs name: a local folder has no revisions; remove revision")
        if (self.train_split is None) != (self.eval_split is None):
            raise ValueError("set both train_split and eval_split, or neither")
        return self

    @model_validator(mode="after")
    def _one_reward(self) -> DatasetArgs:
        if self.reward_by_source and {"reward", "reward_args"} & self.model_fields_set:
            raise ValueError("reward_by_source stands for reward and reward_args; remove those, or name '*' in it")
        if self.reward_args and (len(self.reward) != 1 or self.reward[0].args):
            raise ValueError("reward_args is of a single reward; give each entry of reward its own args")
        return self

    @property
    def rewards(self) -> dict[str, list[RewardEntry]]:
        """Rewards by `data_source`."""
        if self.reward_by_source:
            return self.reward_by_source
        entries = [entry.model_copy(update={"args": self.reward_args}) for entry in self.reward]
        return {ANY_SOURCE: entries if self.reward_args else self.reward}


class Dataset(SingleTurnEnvironment):
    """Answer the prompts of a data set with columns `prompt`, `reward_model` and `uid`; rewards are built-in ones or one's own."""

    id = "dataset"

    def __init__(self, args: DatasetArgs) -> None:
        self.args = args
        self._rewards = Rewards(args.rewards)
        self._tasks = split_rows(args, self._task, problem=self._problem)
        if self._rewards.demanding:
            for split, tasks in self._tasks.items():
                tasks.check(self._rewards.check, split)

    @property
    def compares(self) -> bool:
        return self._rewards.compares

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def _own(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """A row of the files as one of this environment."""
        return row if self.args.layout is None else convert(self.args.layout, row)

    def _problem(self, row: Mapping[str, object]) -> str:
        own = self._own(row)
        if "prompt" not in own:
            raise ValueError(no_prompt(own))
        return json.dumps(own["prompt"], sort_keys=True)

    def _task(self, id: str, row: Mapping[str, object]) -> Task:
        own = self._own(row)
        prompt = messages_of(own["prompt"])
        if self.args.system_prompt is not None and prompt[0]["role"] != "system":
            prompt.insert(0, {"role": "system", "content": self.args.system_prompt})
        if self.args.instruction is not None:
            prompt = with_instruction(prompt, self.args.instruction)
        truth = truth_of(own)
        answer = truth if isinstance(truth, str) else json.dumps(truth)
        return RowTask(id=str(own.get("uid", id)), prompt=prompt, answer=answer, row=own, truth=truth)

    async def score(self, task: Task, episode: Episode) -> Score:
        return await self._rewards.score(task, episode.last_reply)

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> Sequence[Score]:
        return await self._rewards.compare(task, [episode.last_reply for episode in episodes], scores)


def truth_of(row: Mapping[str, object]) -> object:
    """The ground truth of a row: `reward_model.ground_truth`, or the column `ground_truth`. Raises ValueError: it has neither."""
    rewarded = row.get("reward_model", row)
    if isinstance(rewarded, Mapping) and "ground_truth" in rewarded:
        return rewarded["ground_truth"]
    raise ValueError(
        f"there is neither a field 'ground_truth' in the column 'reward_model' nor a column 'ground_truth' (columns: {', '.join(row)})"
    )


def with_instruction(prompt: Sequence[Message], instruction: str) -> list[Message]:
    """A prompt whose last message of the user ends with an instruction. Raises ValueError: it has no such message."""
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place]["role"] == "user":
            told = prompt[place] | {"content": f"{prompt[place]['content']}\n\n{instruction}"}
            return [*prompt[:place], told, *prompt[place + 1 :]]
    raise ValueError("the prompt has no message of the user that instruction could follow")


def messages_of(prompt: object) -> list[Message]:
    """A column's prompt as messages: a text is the user's. Raises ValueError: it is neither a text nor messages."""
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    ):
        return [dict(message) for message in prompt]
    raise ValueError(f"prompt is neither a text nor a list of messages with role and content: {str(prompt)[:80]!r}")


def split_rows(args: DatasetArgs, make: Make, *, problem: Problem) -> dict[Split, RowTasks]:
    """The tasks of both splits.

    Args:
        args: where the data is, and how it is divided.
        make: a task from an id and a row.
        problem: what a row asks, as text: rows that ask the same are in the same split.

    Raises:
        RoleError: the data cannot be read.
        ValueError: a row is malformed, or a split is empty; names file and line.
    """
    root = Path(args.path) if args.path is not None else download(args.name or "", "args", args.revision)
    root = root / args.subset if args.subset else root

    def rows(word: str | None) -> Rows:
        return Rows(DataSetConfig(path=str(root), split=word), "args")

    if args.train_split is not None:
        train, held_out = rows(args.train_split), rows(args.eval_split)
        left = _not_in(held_out, train, problem) if args.leave_out_shared else range(len(train))
        return {
            "train": RowTasks(train, _first(args, train, left, problem), make, "train"),
            "eval": RowTasks(held_out, _first(args, held_out, range(len(held_out)), problem), make, "eval"),
        }
    everything = rows(None)
    positions: dict[Split, list[int]] = {"train": [], "eval": []}
    for position in _first(args, everything, range(len(everything)), problem):
        positions[split_of(_problem(everything, position, problem))].append(position)
    for split, found in positions.items():
        if not found:
            raise EmptySplitError(
                f"the rows are so few that none is left for the {split} split; set train_split and eval_split"
            )
    return {split: RowTasks(everything, found, make, split) for split, found in positions.items()}


def _problem(rows: Rows, position: int, problem: Problem) -> str:
    row = rows.row(position)
    try:
        return problem(row)
    except KeyError as error:
        raise ValueError(f"{rows.place(position)}: there is no column {error}") from None
    except ValueError as error:
        raise ValueError(f"{rows.place(position)}: {error}") from error


def _first(args: DatasetArgs, rows: Rows, positions: Sequence[int], problem: Problem) -> Sequence[int]:
    """Positions without those of rows that ask what an earlier one asks, where rows are to be unique."""
    repeated = args.layout is not None and LAYOUTS[args.layout].repeats
    if not (repeated if args.unique is None else args.unique):
        return positions
    asked: set[bytes] = set()
    left = []
    for position in positions:
        text = _problem(rows, position, problem)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in asked:
            asked.add(digest)
            left.append(position)
    if len(left) < len(positions):
        print(f"{len(positions) - len(left)} rows of {rows.label} are left out: an earlier row asks the same")
    return left


def _not_in(held_out: Rows, train: Rows, problem: Problem) -> list[int]:
    """Positions of the rows of `train` that ask nothing that `held_out` asks."""
    asked = {_problem(held_out, position, problem) for position in range(len(held_out))}
    left = [position for position in range(len(train)) if _problem(train, position, problem) not in asked]
    if not left:
        raise EmptySplitError(
            "the eval split asks all that the train split asks; set train_split and eval_split to others"
        )
    if len(left) < len(train):
        print(f"{len(train) - len(left)} rows of the train split are left out: the eval split asks the same")
    return left


class Gsm8kArgs(BaseModel):
    """Arguments of `gsm8k`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["hub", "bundled"] = "hub"
    """The data set on the hub, or a few problems of the same kind that come with this package."""
    name: str = "openai/gsm8k"
    """The data set on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Default: the main branch."""
    subset: str = "main"
    """Folder within it."""
    path: str | None = None
    """Instead of the hub: the folder with its parquet files."""
    instruction: str = "Reason step by step, and put the final answer within \\boxed{}."
    """Text that follows each question."""
    math: dict[str, object] = Field(default_factory=dict)
    """Options of the comparison: `processes`, `timeout_seconds`."""


class Gsm8k(SingleTurnEnvironment):
    """Solve a word problem of grade-school mathematics (single turn); the reward is 1 if the final answer is right, else 0."""

    id = "gsm8k"

    def __init__(self, args: Gsm8kArgs) -> None:
        self.args = args
        self._score = scorer("math", args.math)
        self._tasks: Mapping[Split, Sequence[Task]]
        if args.source == "bundled":
            half = len(PROBLEMS) * 3 // 4
            bundled = [
                self._task(f"bundled-{i}", {"question": q, "answer": f"#### {a}"}) for i, (q, a) in enumerate(PROBLEMS)
            ]
            self._tasks = {"train": bundled[:half], "eval": bundled[half:]}
            return
        where = (
            {"path": args.path}
            if args.path is not None
            else {"name": args.name, "subset": args.subset, "revision": args.revision}
        )
        files = {"train_split": "train", "eval_split": "test", "leave_out_shared": True}
        self._tasks = split_rows(
            DatasetArgs.model_validate(where | files), self._task, problem=lambda row: str(row["question"])
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def _task(self, id: str, row: Mapping[str, object]) -> Task:
        question = row["question"]
        if not isinstance(question, str):
            raise ValueError(f"the question is no text: {str(question)[:80]!r}")
        prompt = f"{question.strip()}\n\n{self.args.instruction}".strip()
        return Task(id, [{"role": "user", "content": prompt}], answer=final_answer(str(row["answer"])))

    async def score(self, task: Task, episode: Episode) -> Score:
        right = await self._score(task, episode.last_reply)
        return Score(right, {"boxed": float("\\boxed" in episode.last_reply)})
