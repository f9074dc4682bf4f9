"""Distinct tasks: an id names one task of an environment, and no task of the train split is held out in the eval split as well.

What is at hand is checked when the environment is loaded: lists and tuples, and rows of data files. Any other sequence makes its
tasks by the environment's code when it is asked for them, which costs time and may fail; its ids are compared as its tasks are
played (`InProcessStage`). Generated tasks are distinct by construction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from rlrun.environments.bounds import clip_text, name_of
from rlrun.environments.message_content import ContentError, check_prompt
from rlrun.environments.protocol import Split, Task
from rlrun.environments.splits import GeneratedTasks

CHECKED = 200_000
"""Tasks of each split that are checked, the first ones: some seconds of reading rows."""
NAMED = 10
"""Most tasks that one message names."""
_NAME_CHARACTERS = 80


class SharedTaskError(ValueError):
    """Tasks that are not distinct; names up to `NAMED` of them with their places and the fix."""


class PromptError(ValueError):
    """Prompts that no model can be asked."""


@runtime_checkable
class AtHand(Protocol):
    """A sequence of tasks that is read without code of an environment."""

    identified_by_content: bool
    """True if prompt, answer and info are all of a task, so that two tasks in which these are equal are the same."""


def check_prompts(splits: Mapping[Split, Sequence[Task]]) -> None:
    """Refuse prompts that no model can be asked, of tasks at hand whose prompt is the only request.

    Args:
        splits: all tasks of an environment of single turns.

    Raises:
        PromptError: contains up to `NAMED` tasks and the reason of each.
    """
    refused: list[str] = []
    for split, tasks in splits.items():
        if type(tasks) not in (list, tuple):  # rows are checked where tasks are made of them
            continue
        for index, task in enumerate(islice(tasks, CHECKED)):
            try:
                check_prompt(task.prompt)
            except ContentError as error:
                refused.append(f"{_name_tasks(name_of(task), [f'{split}[{index}]'])}: {error}")
    if refused:
        raise PromptError(f"{_show_tasks(len(refused))} cannot be played: {_list_ids(refused)}")


def check_distinct(splits: Mapping[Split, Sequence[Task]]) -> dict[Split, str]:
    """Refuse tasks with the id of another one, and tasks of both splits.

    Two tasks of different splits are the same where their ids are equal, and where prompt, answer and info are: this only if no other
    task of either split has these, since an environment may know by the id alone what a task asks. A task that cannot be read is
    passed over: it fails where it is played.

    Args:
        splits: all tasks of an environment.

    Returns:
        Digest of the tasks of each split, by which a later attempt recognizes another data set: number, ids, prompts and answers.
        `info` does not count, because it may name folders of one process. Of tasks that are not at hand only the number counts, and of
        generated tasks the first and the last.

    Raises:
        SharedTaskError: two are the same.
    """
    digests = {split: hashlib.blake2b(f"{len(tasks)}".encode(), digest_size=8) for split, tasks in splits.items()}
    known = {
        split: list(_readable_tasks(split, tasks, digests[split])) for split, tasks in splits.items() if _at_hand(tasks)
    }
    for split, found in known.items():
        _refuse_equal_ids(split, found)
    if {"train", "eval"} <= set(known):
        strict = any(isinstance(tasks, AtHand) and tasks.identified_by_content for tasks in splits.values())
        _refuse_shared(known["train"], known["eval"], strict=strict)
    for split, tasks in splits.items():
        if isinstance(tasks, GeneratedTasks) and len(tasks):
            for task in (tasks[0], tasks[len(tasks) - 1]):
                digests[split].update(_digest_value(task.id, [task.prompt, task.answer]))
    return {split: digest.hexdigest() for split, digest in digests.items()}


_Known = tuple[str, str, bytes]
"""Place, id, and a digest of the task's content; b"": it is no JSON."""


def needs_proof(tasks: Sequence[Task]) -> bool:
    """True if the ids of a sequence have to be compared as its tasks are played."""
    return not _at_hand(tasks) and not isinstance(tasks, GeneratedTasks)


def _at_hand(tasks: Sequence[Task]) -> bool:
    return type(tasks) in (list, tuple) or isinstance(tasks, AtHand)


def _readable_tasks(split: Split, tasks: Sequence[Task], digest: hashlib.blake2b) -> Iterator[_Known]:
    """Yield the tasks that can be read, and add each to the digest of the split."""
    for index in islice(range(len(tasks)), CHECKED):
        try:
            task = tasks[index]
        except ValueError:
            continue
        id = name_of(task)
        digest.update(_digest_value(id, [task.prompt, task.answer]))
        yield f"{split}[{index}]", id, _digest_value(task.prompt, task.answer, task.info)


def _digest_value(*values: object) -> bytes:
    """16 bytes over JSON values; b"" if they are not JSON."""
    try:
        text = json.dumps(values, sort_keys=True)
    except Exception:  # whatever the environment has put there; it fails where it is played
        return b""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _refuse_equal_ids(split: Split, found: Sequence[_Known]) -> None:
    places: dict[str, list[str]] = {}
    for place, id, _ in found:
        places.setdefault(id, []).append(place)
    shared = [_name_tasks(id, own) for id, own in places.items() if len(own) > 1]
    if shared:
        raise SharedTaskError(
            f"{_show_tasks(len(shared))} of the {split} split {'have' if len(shared) > 1 else 'has'} an id that names another task too: "
            f"{_list_ids(shared)}; give each task an id of its own"
        )


def _refuse_shared(train: Sequence[_Known], held_out: Sequence[_Known], *, strict: bool) -> None:
    ids = {id: place for place, id, _ in train}
    contents = _by_content(train, strict=strict)
    asked = _by_content(held_out, strict=strict)
    shared = []
    for place, id, content in held_out:
        if id in ids:
            shared.append(_name_tasks(id, [ids[id], place]))
        elif (same := contents.get(content)) is not None and content in asked and (strict or len(contents) > 1):
            shared.append(f"{_quote_id(id)} ({place}, which asks the same as {_quote_id(same[1])}, {same[0]})")
    if shared:
        raise SharedTaskError(
            f"the train and the eval split share {_show_tasks(len(shared))}: {_list_ids(shared)}; "
            "evaluation would ask what was trained on: "
            "leave them out of one split (or, where they only look the same, give them different ids and say in info how they differ)"
        )


def _by_content(found: Sequence[_Known], *, strict: bool) -> dict[bytes, _Known]:
    """Tasks by what they say; without those of which there are several, unless it is `strict`."""
    first: dict[bytes, _Known] = {}
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
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
