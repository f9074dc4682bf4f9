"""`dataset` and `gsm8k`: one prompt per row, one reply, and a reward that compares the reply with the row's answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, overload

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlrun.config.models.data import DataSetConfig
from rlrun.environments.bundled.word_problems import PROBLEMS
from rlrun.environments.dataset_rows import Rows, download_set
from rlrun.environments.layouts import LAYOUTS, LayoutName, convert_row, final_answer, no_prompt
from rlrun.environments.message_content import (
    check_prompt,
    content_text,
    media_columns,
    refuse_media,
    refuse_surrogates,
    unread_columns,
)
from rlrun.environments.protocol import Episode, Message, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.rewards.reward_functions import ANY_SOURCE, RewardEntries, RewardEntry
from rlrun.environments.rewards.scorers import find_scorer
from rlrun.environments.rewards.weighted_rewards import Rewards, RowTask
from rlrun.environments.splits import MAX_CHECKED_TASKS, EmptySplitError, split_of


class RowTasks(Sequence[Task]):
    """Tasks that are created from rows on access.

    Args:
        rows: rows of the files.
        positions: positions of the split's rows.
        make: function that creates a task from a default id and a row. It uses the id in the row instead, if the row has one.
        split: split of the tasks; the first part of default ids.
    """

    identified_by_content = True
    """Rows with equal contents are the same task, even if their ids differ (`splits.check_distinct`)."""

    def __init__(self, rows: Rows, positions: Sequence[int], make: MakeTask, split: Split) -> None:
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
            return self._read_task(position)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._rows.describe_place(position)}: {_row_problem(error)}") from error

    def _read_task(self, position: int) -> Task:
        return self._make(f"{self._split}-{position}", self._rows.row(position))


def _row_problem(error: Exception) -> str:
    """Return the fault of a malformed row as text."""
    return f"the column {error} is missing" if isinstance(error, KeyError) else str(error)


def _row_places(places: Sequence[str]) -> str:
    shown = ", ".join(places[:3])
    return shown if len(places) <= 3 else f"{shown} and {len(places) - 3} more"


MakeTask = Callable[[str, Mapping[str, object]], Task]
"""Function that creates a task from a default id and a row of the files."""
ReadQuestion = Callable[[Mapping[str, object]], str]
"""Function that returns the problem (the question) of a row as text. Equal texts are equal problems."""
MAX_NAMED_REASONS = 5
"""Largest number of reasons in one message about malformed rows."""


class DatasetArgs(BaseModel):
    """Arguments of `dataset`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = None
    """A `.parquet`, `.jsonl` or `.csv` file, or a folder with such files."""
    name: str | None = None
    """Data set of the hub with such files. Replaces `path`."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Default: the main branch."""
    subset: str | None = None
    """Folder within the data set."""
    train_split: str | None = None
    """Word in the names of the train split's files. Default: use all rows and hold out one problem in eight."""
    eval_split: str | None = None
    """Word in the names of the eval split's files."""
    leave_out_shared: bool = False
    """Leave out rows of the train split whose prompt also occurs in the eval split, instead of rejecting the data."""
    layout: LayoutName | None = None
    """Public set whose layout the files have. Their rows are converted to rows of this environment."""
    malformed: Literal["Fail", "Skip"] = "Fail"
    """Handling of rows that cannot be played (no prompt, images, an unusable ground truth): reject the data, or leave out the rows."""
    unique: bool | None = None
    """Leave out rows whose prompt occurs in an earlier row. Default: only for layouts whose set contains rows several times."""
    reward: RewardEntries = Field(default="math", validate_default=True)
    """Reward of a reply: a built-in reward, `package.module:function`, or a list of `{name, weight, args}`."""
    reward_args: dict[str, object] = Field(default_factory=dict)
    """Options of a single reward."""
    reward_by_source: dict[str, RewardEntries] = Field(default_factory=dict)
    """Rewards by the column `data_source`; `*` applies to all other sources. Replaces `reward`."""
    system_prompt: str | None = None
    """System message for prompts that have none."""
    instruction: str | None = None
    """Text that is appended to the user's last message, after an empty line."""

    @model_validator(mode="after")
    def _check_source(self) -> DatasetArgs:
        if (self.path is None) == (self.name is None):
            raise ValueError("set exactly one of path and name; it selects the data")
        if self.revision is not None and self.name is None:
            raise ValueError(f"revision ({self.revision}) needs name: a local folder has no revisions; remove revision")
        if (self.train_split is None) != (self.eval_split is None):
            raise ValueError("set both train_split and eval_split, or neither")
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> DatasetArgs:
        if self.reward_by_source and {"reward", "reward_args"} & self.model_fields_set:
            raise ValueError(
                "reward_by_source replaces reward and reward_args; remove those, or use '*' in reward_by_source"
            )
        if self.reward_args and (len(self.reward) != 1 or self.reward[0].args):
            raise ValueError(
                "reward_args needs exactly one reward without args; set args in each entry of reward instead"
            )
        return self

    @property
    def rewards(self) -> dict[str, list[RewardEntry]]:
        """Rewards by `data_source`."""
        if self.reward_by_source:
            return self.reward_by_source
        entries = [entry.model_copy(update={"args": self.reward_args}) for entry in self.reward]
        return {ANY_SOURCE: entries if self.reward_args else self.reward}


class Dataset(SingleTurnEnvironment):
    """Answer the prompts of a data set with columns `prompt`, `reward_model` and `uid`; rewards are built in or custom functions."""

    id = "dataset"

    def __init__(self, args: DatasetArgs) -> None:
        self.args = args
        self._rewards = Rewards(args.rewards)
        self._unread: dict[str, None] = {}
        """Columns that are not empty and that no part of the environment reads, in the order of the rows. `_make_task` adds them: for the
        rows that `split_rows` checks in this constructor, and for other rows when their tasks are read."""
        self._notices: list[str] = []
        self._tasks = split_rows(args, self._make_task, read_question=self._read_question, notices=self._notices)

    @property
    def notices(self) -> Sequence[str]:
        unread = [
            f"the column {name!r} is ignored: this environment offers neither tools nor images" for name in self._unread
        ]
        return [*self._notices, *unread]

    @property
    def compares(self) -> bool:
        """Whether a reward compares the replies of a group (`protocol.ComparesGroups`)."""
        return self._rewards.compares

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def _convert_row(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """Return a row of the files as a row of this environment."""
        return row if self.args.layout is None else convert_row(self.args.layout, row)

    def _read_question(self, row: Mapping[str, object]) -> str:
        own = self._convert_row(row)  # row in the format of this environment
        if "prompt" not in own:
            raise ValueError(no_prompt(own))
        return json.dumps(own["prompt"], sort_keys=True)

    def _make_task(self, id: str, row: Mapping[str, object]) -> Task:
        own = self._convert_row(row)
        if "prompt" not in own:
            raise ValueError(no_prompt(own))
        refuse_media(own, "column")
        dropped = [name for name in media_columns(row) if name not in own]
        self._unread |= dict.fromkeys([*dropped, *unread_columns(row)])
        prompt = messages_of(own["prompt"])
        check_prompt(prompt)
        if self.args.system_prompt is not None and prompt[0]["role"] != "system":
            prompt.insert(0, {"role": "system", "content": self.args.system_prompt})
        if self.args.instruction is not None:
            prompt = with_instruction(prompt, self.args.instruction)
        truth = truth_of(own)
        self._rewards.check(own, truth)
        answer = truth if isinstance(truth, str | None) else json.dumps(truth)
        if answer is not None:
            refuse_surrogates(answer, "ground_truth")  # files and requests accept only valid Unicode
        return RowTask(id=str(own.get("uid", id)), prompt=prompt, answer=answer, row=own, truth=truth)

    async def score(self, task: Task, episode: Episode) -> Score:
        return await self._rewards.score(task, episode.last_reply)

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> Sequence[Score]:
        return await self._rewards.compare(task, [episode.last_reply for episode in episodes], scores)


def truth_of(row: Mapping[str, object]) -> object:
    """Return the ground truth of a row: `reward_model.ground_truth` or the column `ground_truth`. Raises ValueError if both are missing."""
    rewarded = row.get("reward_model", row)
    if isinstance(rewarded, Mapping) and "ground_truth" in rewarded:
        return rewarded["ground_truth"]
    raise ValueError(
        "the ground truth is missing: no field 'ground_truth' in the column 'reward_model', and no column 'ground_truth' "
        f"(columns: {', '.join(row)})"
    )


def with_instruction(prompt: Sequence[Message], instruction: str) -> list[Message]:
    """Append an instruction to the last user message of a prompt. Raises ValueError if there is no user message."""
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place]["role"] == "user":
            content = content_text(prompt[place].get("content"), f"prompt[{place}].content")
            instructed = prompt[place] | {"content": f"{content}\n\n{instruction}"}
            return [*prompt[:place], instructed, *prompt[place + 1 :]]
    raise ValueError("the prompt has no user message to which the instruction can be appended")


def messages_of(prompt: object) -> list[Message]:
    """Return the prompt of a row as messages with texts. A prompt that is a text becomes a user message.

    Raises:
        ValueError: the prompt is neither a text nor messages, or a message contains more than text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and ("content" in m or m.get("tool_calls"))
        for m in prompt
    ):
        for message in prompt:
            refuse_media(message, "field")
        return [
            message | {"content": content_text(message.get("content"), f"prompt[{index}].content")}
            for index, message in enumerate(prompt)
        ]
    raise ValueError(f"prompt is neither a text nor a list of messages with role and content: {str(prompt)[:80]!r}")


def split_rows(
    args: DatasetArgs, make: MakeTask, *, read_question: ReadQuestion, notices: list[str] | None = None
) -> dict[Split, RowTasks]:
    """Return the tasks of both splits.

    Args:
        args: location and division of the data.
        make: function that creates a task from an id and a row.
        read_question: function that returns the question of a row as text. Without given splits, its hash selects the row's split, so rows
            with equal questions are in the same split.
        notices: list to which one sentence is appended for each kind of rows that are left out. Default: the sentences are only printed.

    Raises:
        RoleError: the data cannot be read.
        ValueError: a row is malformed and `args.malformed` is `Fail`, or a split is empty. The message contains file and line.
    """
    notices = [] if notices is None else notices
    root = Path(args.path) if args.path is not None else download_set(args.name or "", "args", args.revision)
    root = root / args.subset if args.subset else root

    def rows(word: str | None) -> Rows:
        return Rows(DataSetConfig(path=str(root), split=word), "args")  # "args": manifest field in messages

    # `left` and `asked`: positions of the rows that remain in the train split and in the eval split.
    if args.train_split is not None:
        train, held_out = rows(args.train_split), rows(args.eval_split)
        left = _usable_rows(args, train, make, notices, "train split: ")
        asked = _usable_rows(args, held_out, make, notices, "eval split: ")
        if args.leave_out_shared:
            left = _not_in(held_out, asked, train, left, read_question, notices)
        return {
            "train": RowTasks(train, _distinct_positions(args, train, left, read_question, notices), make, "train"),
            "eval": RowTasks(
                held_out, _distinct_positions(args, held_out, asked, read_question, notices), make, "eval"
            ),
        }
    everything = rows(None)
    positions: dict[Split, list[int]] = {"train": [], "eval": []}
    for position in _distinct_positions(
        args, everything, _usable_rows(args, everything, make, notices), read_question, notices
    ):
        positions[split_of(_question_at(everything, position, read_question))].append(position)
    for split, found in positions.items():
        if not found:
            raise EmptySplitError(f"there are too few rows: the {split} split is empty; set train_split and eval_split")
    return {split: RowTasks(everything, found, make, split) for split, found in positions.items()}


@dataclass
class _MalformedRows:
    """Malformed rows with the same fault."""

    reason: str
    """Error of the first row."""
    places: list[str] = field(default_factory=list)
    """File and line of each row."""


def _usable_rows(args: DatasetArgs, rows: Rows, make: MakeTask, notices: list[str], what: str = "") -> Sequence[int]:
    """Return the positions of rows that can be used as tasks.

    With `args.malformed: Skip`, all rows are checked, and the positions of malformed rows are left out. With `Fail`, malformed rows are an
    error. To limit the time of the start, only the first 200,000 rows are checked, and all positions are returned: a later malformed row
    fails when an episode of its task starts.

    Args:
        args: location and division of the data.
        rows: rows of the files.
        make: function that raises an error for a malformed row; its task is not used here.
        notices: list to which one sentence about left-out rows is appended.
        what: prefix of the error's message.

    Raises:
        ValueError: rows are malformed, or no row can be used. The message contains the first rows, their number and each reason.
    """
    is_error = args.malformed == "Fail"
    usable: list[int] = []
    malformed: dict[str, _MalformedRows] = {}
    for position in range(min(len(rows), MAX_CHECKED_TASKS) if is_error else len(rows)):
        try:
            make("", rows.row(position))
            usable.append(position)
        except (KeyError, TypeError, ValueError) as error:
            # Rows with the same fault are listed together, even if their values differ: `fix` is the constant part of a `TruthError`.
            reason = _row_problem(error)
            malformed.setdefault(getattr(error, "fix", reason), _MalformedRows(reason)).places.append(
                rows.describe_place(position)
            )
    if malformed and (is_error or not usable):
        advice = "correct or remove the rows" + (", or set args.malformed to Skip" if is_error else "")
        raise ValueError(f"{what}{_describe_malformed(malformed)}; {advice}")
    if malformed:
        left_out = f"{len(rows) - len(usable)} of {len(rows)} rows of {rows.label} are left out as malformed"
        _report_notice(notices, f"{left_out}: {_describe_malformed(malformed)}")
    return range(len(rows)) if is_error else usable


def _describe_malformed(malformed: Mapping[str, _MalformedRows]) -> str:
    """Return a text with up to `MAX_NAMED_REASONS` reasons, the rows of each, and the number of the other rows."""
    named = list(malformed.values())[:MAX_NAMED_REASONS]
    others = sum(len(rows.places) for rows in malformed.values()) - sum(len(rows.places) for rows in named)
    text = "; ".join(f"{_row_places(rows.places)}: {rows.reason}" for rows in named)
    return text + (f"; and {others} more rows" if others else "")


def _report_notice(notices: list[str], text: str) -> None:
    """Print a notice to the environment's log, and store it for the run's log and `rlrun validate`."""
    print(text)
    notices.append(text)


def _question_at(rows: Rows, position: int, read_question: ReadQuestion) -> str:
    row = rows.row(position)
    try:
        return read_question(row)
    except KeyError as error:
        raise ValueError(f"{rows.describe_place(position)}: the column {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"{rows.describe_place(position)}: {error}") from error


def _distinct_positions(
    args: DatasetArgs, rows: Rows, positions: Sequence[int], read_question: ReadQuestion, notices: list[str]
) -> Sequence[int]:
    """Return the positions without rows whose question occurs in an earlier row, if rows have to be unique; otherwise all positions."""
    repeated = args.layout is not None and LAYOUTS[args.layout].repeats
    if not (repeated if args.unique is None else args.unique):
        return positions
    digests: set[bytes] = set()
    distinct = []
    for position in positions:
        text = _question_at(rows, position, read_question)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in digests:
            digests.add(digest)
            distinct.append(position)
    if len(distinct) < len(positions):
        _report_notice(
            notices,
            f"{len(positions) - len(distinct)} rows of {rows.label} are left out: an earlier row has the same prompt",
        )
    return distinct


def _not_in(
    held_out: Rows,
    eval_positions: Sequence[int],
    train: Rows,
    positions: Sequence[int],
    read_question: ReadQuestion,
    notices: list[str],
) -> list[int]:
    """Return the positions of train rows whose question does not occur in the eval split.

    Args:
        held_out: rows of the eval split's files.
        eval_positions: positions of the usable rows in `held_out`.
        train: rows of the train split's files.
        positions: positions of the usable rows in `train`.
        read_question: function that returns the question of a row as text.
        notices: list to which one sentence about left-out rows is appended.

    Raises:
        EmptySplitError: no row remains.
    """
    eval_questions = {_question_at(held_out, position, read_question) for position in eval_positions}
    remaining = [
        position for position in positions if _question_at(train, position, read_question) not in eval_questions
    ]
    if not remaining:
        raise EmptySplitError(
            "the eval split contains all prompts of the train split; set train_split and eval_split to other files"
        )
    if len(remaining) < len(positions):
        _report_notice(
            notices,
            f"{len(positions) - len(remaining)} rows of the train split are left out: the eval split has the same prompts",
        )
    return remaining


class Gsm8kArgs(BaseModel):
    """Arguments of `gsm8k`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["hub", "bundled"] = "hub"
    """Origin of the problems: the data set of the hub, or a few similar problems in this package."""
    name: str = "openai/gsm8k"
    """Data set of the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Default: the main branch."""
    subset: str = "main"
    """Folder within the data set."""
    path: str | None = None
    """Folder with the parquet files. Replaces the hub."""
    instruction: str = "Reason step by step, and put the final answer within \\boxed{}."
    """Text that is appended to each question."""
    math: dict[str, object] = Field(default_factory=dict)
    """Options of the comparison: `processes`, `timeout_seconds`."""


class Gsm8k(SingleTurnEnvironment):
    """Solve a word problem of grade-school mathematics (single turn); the reward is 1 if the final answer is right, else 0."""

    id = "gsm8k"

    def __init__(self, args: Gsm8kArgs) -> None:
        self.args = args
        self._score = find_scorer("math", args.math)
        self._tasks: Mapping[Split, Sequence[Task]]
        if args.source == "bundled":
            half = len(PROBLEMS) * 3 // 4  # end of the train split: three quarters of the problems
            bundled = [
                self._make_task(f"bundled-{i}", {"question": q, "answer": f"#### {a}"})
                for i, (q, a) in enumerate(PROBLEMS)
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
            DatasetArgs.model_validate(where | files), self._make_task, read_question=lambda row: str(row["question"])
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def _make_task(self, id: str, row: Mapping[str, object]) -> Task:
        question = row["question"]
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"the question is not a text: {str(question)[:80]!r}")
        refuse_surrogates(question, "question")
        prompt = f"{question.strip()}\n\n{self.args.instruction}".strip()
        return Task(id, [{"role": "user", "content": prompt}], answer=final_answer(str(row["answer"])))

    async def score(self, task: Task, episode: Episode) -> Score:
        # The metric `boxed` is the share of replies that use the format which the instruction requests.
        right = await self._score(task, episode.last_reply)
        return Score(right, {"boxed": float("\\boxed" in episode.last_reply)})
