"""Train and eval splits of tasks: generated tasks, and checks that tasks are distinct.

Generated tasks are created on access. The hash of a problem's text determines its split, so no problem can occur in both splits, for any
seed and size.

The checks ensure that no two tasks of a split have the same id and that the splits share no task. Lists, tuples and rows of data files are
checked when the environment is loaded. Other sequences create a task by the environment's code at each access, which costs time and may
fail; the ids of such tasks are compared when the tasks are played (`InProcessStage`). Generated tasks need no check.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, overload, runtime_checkable

from rlrun.environments.bounds import clip_text, name_of
from rlrun.environments.message_content import ContentError, check_prompt
from rlrun.environments.protocol import Split, Task

EVAL_ONE_IN = 8
"""Share of the problems that are held out for evaluation: one in 8."""

MAX_DRAWS = 10_000
"""Number of draws after which a split counts as empty.

The hash assigns about one problem in `EVAL_ONE_IN` to the eval split. Unless `draw` returns the problems of one split very rarely, a split
that is not empty needs far fewer draws.
"""


class EmptySplitError(ValueError):
    """Error for arguments that leave one of the splits without problems."""


def split_of(problem: str) -> Split:
    """Return the split of a problem (the question of a task), which depends only on the problem's text."""
    return "eval" if hashlib.sha256(problem.encode()).digest()[0] % EVAL_ONE_IN == 0 else "train"


class GeneratedTasks(Sequence[Task]):
    """`count` tasks of one split. Task `i` depends only on `(seed, split, i)` and is created on access.

    Problems repeat if `count` exceeds the number of different problems. Access raises `EmptySplitError` if the split has no problem.

    Args:
        split: split of the tasks.
        count: number of tasks.
        seed: seed of the drawings.
        draw: function that samples a problem's text from all problems.
        make: function that creates a task from an id and a problem's text.
    """

    def __init__(
        self,
        split: Split,
        *,
        count: int,
        seed: int,
        draw: Callable[[random.Random], str],
        make: Callable[[str, str], Task],
    ) -> None:
        self._split, self._count, self._seed, self._draw, self._make = split, count, seed, draw, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"task {index} of {self._count}")
        problem = self._problem_at(position)
        digest = hashlib.sha256(problem.encode()).hexdigest()[:8]
        task = self._make(id := f"{self._split}-{position}-{digest}", problem)
        if task.id != id:
            raise ValueError(
                f"make() gave the task {id!r} the id {task.id!r}; it has to use the given id, which makes tasks distinct"
            )
        return task

    def _problem_at(self, position: int) -> str:
        # A text as seed is hashed with SHA-512, so the tasks do not depend on PYTHONHASHSEED.
        rng = random.Random(f"{self._seed}/{self._split}/{position}")
        for _ in range(MAX_DRAWS):
            problem = self._draw(rng)
            if split_of(problem) == self._split:
                return problem
        raise EmptySplitError(
            f"these arguments allow so few problems that the {self._split} split is empty; allow more problems"
        )


MAX_CHECKED_TASKS = 200_000
"""Number of tasks of each split that are checked, from the first one. Reading them takes a few seconds."""
MAX_NAMED_TASKS = 10
"""Largest number of tasks in one message."""
_NAME_CHARACTERS = 80


class DuplicateTaskError(ValueError):
    """Error for tasks of one split with equal ids, or for tasks that occur in both splits.

    The message contains up to `MAX_NAMED_TASKS` tasks with their positions, and the fix.
    """


class PromptError(ValueError):
    """Error for prompts that cannot be sent to a model."""


@runtime_checkable
class ReadableTasks(Protocol):
    """Sequence of tasks that can be read without running code of an environment, such as rows of data files.

    Any sequence with the attribute `identified_by_content` counts, with any value of the attribute.
    """

    identified_by_content: bool
    """Whether prompt, answer and info define a task, so that two tasks with equal contents are the same task."""


def check_prompts(splits: Mapping[Split, Sequence[Task]]) -> None:
    """Reject prompts that cannot be sent to a model. Only lists and tuples of tasks are checked.

    Args:
        splits: all tasks of a single-turn environment, whose episodes send only the task's prompt to the model.

    Raises:
        PromptError: contains up to `MAX_NAMED_TASKS` tasks and the reason for each.
    """
    refused: list[str] = []
    for split, tasks in splits.items():
        if type(tasks) not in (list, tuple):  # rows of data files are checked when tasks are created from them
            continue
        for index, task in enumerate(islice(tasks, MAX_CHECKED_TASKS)):
            try:
                check_prompt(task.prompt)
            except ContentError as error:
                refused.append(f"{_name_tasks(name_of(task), [f'{split}[{index}]'])}: {error}")
    if refused:
        raise PromptError(f"{_show_tasks(len(refused))} cannot be played: {_list_ids(refused)}")


def check_distinct(splits: Mapping[Split, Sequence[Task]]) -> dict[Split, str]:
    """Reject tasks that share an id, and tasks that occur in both splits.

    Two tasks of different splits are the same if their ids are equal, or if their contents (prompt, answer and info) are equal.

    An environment may derive a task's question from its id; then many tasks have equal contents. Therefore a content that several tasks of
    one split have is not compared. This exception does not apply if `identified_by_content` is true for one of the splits: equal contents
    are then the same task.

    A task that cannot be read is skipped, because it fails when its episode starts.

    Args:
        splits: all tasks of an environment.

    Returns:
        Digest of the tasks of each split, by which a later attempt detects a different data set. It covers the number, ids, prompts
        and answers of the tasks; `info` is left out because it may contain folders of one process. Tasks that cannot be read, or that
        are not JSON, change only the number. For tasks that only code of the environment can create, the digest covers only their number.
        For generated tasks it covers their number, the first and the last task.

    Raises:
        DuplicateTaskError: two tasks are the same.
    """
    digests = {split: hashlib.blake2b(f"{len(tasks)}".encode(), digest_size=8) for split, tasks in splits.items()}
    known = {
        split: list(_readable_tasks(split, tasks, digests[split]))
        for split, tasks in splits.items()
        if _is_readable(tasks)
    }
    for split, found in known.items():
        _refuse_equal_ids(split, found)
    if {"train", "eval"} <= set(known):
        strict = any(isinstance(tasks, ReadableTasks) and tasks.identified_by_content for tasks in splits.values())
        _refuse_shared(known["train"], known["eval"], strict=strict)
    for split, tasks in splits.items():
        if isinstance(tasks, GeneratedTasks) and len(tasks):
            for task in (tasks[0], tasks[len(tasks) - 1]):
                digests[split].update(_digest_value(task.id, [task.prompt, task.answer]))
    return {split: digest.hexdigest() for split, digest in digests.items()}


_Known = tuple[str, str, bytes]
"""Position, id, and a digest of the task's content (b"" if the content is not JSON)."""


def needs_proof(tasks: Sequence[Task]) -> bool:
    """Return whether the ids of a sequence's tasks have to be compared later, each time an episode reads a task.

    This is necessary for tasks that only code of the environment can create: they are not read in advance.
    """
    return not _is_readable(tasks) and not isinstance(tasks, GeneratedTasks)


def _is_readable(tasks: Sequence[Task]) -> bool:
    """Return whether the tasks can be read without running code of an environment."""
    return type(tasks) in (list, tuple) or isinstance(tasks, ReadableTasks)


def _readable_tasks(split: Split, tasks: Sequence[Task], digest: hashlib.blake2b) -> Iterator[_Known]:
    """Yield the tasks that can be read, and add each to the digest of the split."""
    for index in islice(range(len(tasks)), MAX_CHECKED_TASKS):
        try:
            task = tasks[index]
        except ValueError:
            continue
        id = name_of(task)
        digest.update(_digest_value(id, [task.prompt, task.answer]))
        yield f"{split}[{index}]", id, _digest_value(task.prompt, task.answer, task.info)


def _digest_value(*values: object) -> bytes:
    """Return a digest of JSON values (16 bytes), or b"" if they are not JSON."""
    try:
        text = json.dumps(values, sort_keys=True)
    except Exception:  # the environment can put any object into a task; such a task fails when it is played
        return b""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _refuse_equal_ids(split: Split, found: Sequence[_Known]) -> None:
    places: dict[str, list[str]] = {}
    for place, id, _ in found:
        places.setdefault(id, []).append(place)
    shared = [_name_tasks(id, own) for id, own in places.items() if len(own) > 1]
    if shared:
        raise DuplicateTaskError(
            f"{_show_tasks(len(shared))} of the {split} split {'share their ids' if len(shared) > 1 else 'shares its id'} with another "
            f"task: {_list_ids(shared)}; give each task a different id"
        )


def _refuse_shared(train: Sequence[_Known], held_out: Sequence[_Known], *, strict: bool) -> None:
    ids = {id: place for place, id, _ in train}
    contents = _by_content(train, strict=strict)
    asked = _by_content(held_out, strict=strict)
    shared = []
    for place, id, content in held_out:
        if id in ids:
            shared.append(_name_tasks(id, [ids[id], place]))
        # If the train split has only one such content, its equality may also come from an environment that derives questions from ids.
        elif (same := contents.get(content)) is not None and content in asked and (strict or len(contents) > 1):
            shared.append(f"{_quote_id(id)} ({place}, same content as {_quote_id(same[1])}, {same[0]})")
    if shared:
        raise DuplicateTaskError(
            f"the train and the eval split share {_show_tasks(len(shared))}: {_list_ids(shared)}; "
            "evaluation would use tasks of the training. "
            "Remove them from one split (or, if they only look the same, give them different ids and state the difference in info)"
        )


def _by_content(found: Sequence[_Known], *, strict: bool) -> dict[bytes, _Known]:
    """Return the first task of each content. Unless `strict`, contents that several tasks share are left out."""
    first: dict[bytes, _Known] = {}
    # Tasks that are not JSON have no digest, so their contents are unknown and not compared.
    several: set[bytes] = {b""}
    for known in found:
        if known[2] in first and not strict:
            several.add(known[2])
        first.setdefault(known[2], known)
    return {content: known for content, known in first.items() if content not in several}


def _show_tasks(count: int) -> str:
    return f"{count} task{'s' if count > 1 else ''}"


def _quote_id(id: str) -> str:
    return repr(clip_text(id, _NAME_CHARACTERS))


def _name_tasks(id: str, places: Sequence[str]) -> str:
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return f"{_quote_id(id)} ({shown})"


def _list_ids(found: Sequence[str]) -> str:
    return ", ".join(found[:MAX_NAMED_TASKS]) + (
        f" and {len(found) - MAX_NAMED_TASKS} more" if len(found) > MAX_NAMED_TASKS else ""
    )
