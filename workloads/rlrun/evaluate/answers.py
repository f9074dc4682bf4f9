"""Stored answers: one file per policy and environment (and attempt of a run), with one appended line per answer.

The file's name contains a fingerprint of all settings that affect an answer. Changed settings therefore get a new file,
and finished answers are never requested again, however often a command is interrupted.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Required, Self

from loguru import logger

from rlrun.config.models.rollout import CompleteSampling, EnvironmentConfig
from rlrun.environments.protocol import Message, Split, Tool
from rlrun.evaluate.policies import Policy
from rlrun.orchestrator.evaluation.evaluator import Answer, Question, TraceLine, trace_line
from rlrun.protocol.files.durable import fsync_path, make_folder
from rlrun.protocol.files.failures import storage_errors

ANSWERS = "answers"
"""Folder of all answers, in the folder of a command or a run."""
Key = tuple[int, int]
"""Index of the task in its split, and number of the sample."""


@dataclass(frozen=True)
class Measured:
    """Measured values of a stored rollout. The class has the attributes of `rlrun.orchestrator.evaluation.evaluator.Judged`."""

    reward: float
    metrics: Mapping[str, float]
    truncated: bool
    loss_tokens: int


class _Document(TraceLine, total=False):
    """JSON document of one line: a line of an evaluation's trace, and the index of the task."""

    task: Required[int]
    """Index of the task in its split."""


@dataclass(frozen=True)
class StoredAnswer:
    """Stored answer, read from a file. The class has the attributes of `rlrun.orchestrator.evaluation.evaluator.Answered`."""

    environment: str
    task_id: str
    sample: int
    rollout: Measured | None
    """Measured values, or None if all tries failed."""
    messages: Sequence[Message] = ()
    late: bool = False
    """Always False: only evaluations during training have a deadline, and their answers are not stored here."""
    tools: Sequence[Tool] = ()


def answer_fingerprint(
    policy: Policy, environment: EnvironmentConfig, sampling: CompleteSampling, *, seq_len: int, split: Split
) -> str:
    """Return 12 hex digits of a hash of the settings that affect an answer, which is a part of the file's name.

    Timeouts and limits are excluded, so the answers are also used by a later command that has other ones.
    """
    document = {
        "policy": [policy.step, policy.identity],
        "environment": [environment.label, environment.id, environment.args, environment.python],
        "sampling": sampling.identity(),
        "seq_len": seq_len,
        "split": split,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


class AnswerFile:
    """Answers of one policy to one environment's tasks, and the only writer of their file.

    Args:
        path: path of the file, created with the first answer.
        others: files of other attempts. They are only read, because a process of an earlier attempt that did not end may still write one.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        self.path, self._others = path, tuple(others)
        self._lines: dict[Key, _Document] = {}
        for other in self._others:
            self._add_lines(other.read_bytes().rpartition(b"\n")[0])
        content = path.read_bytes() if path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        self._add_lines(whole)
        if torn:  # left by a killed writer; new lines must not be appended to it
            with storage_errors(path.parent):
                os.truncate(path, len(content) - len(torn))

    @classmethod
    def open_in(
        cls, folder: Path, policy: Policy, environment: EnvironmentConfig, fingerprint: str, attempt: int | None = None
    ) -> Self:
        """Open the file of a policy and an environment in a folder of answers.

        Args:
            folder: folder of all answers.
            policy: policy that answers.
            environment: environment of the tasks.
            fingerprint: result of `answer_fingerprint`.
            attempt: number of the run's attempt. New answers are then written to a file of this attempt, and the answers of all other
                attempts are read, too. None: all answers are in one file.
        """
        place, name = folder / _file_name(policy.name), f"{_file_name(environment.label)}.{fingerprint}"
        if attempt is None:
            return cls(place / f"{name}.jsonl")
        own = place / f"{name}.a{attempt:04d}.jsonl"
        return cls(own, sorted(file for file in place.glob(f"{glob.escape(name)}.a*.jsonl") if file != own))

    def _add_lines(self, whole: bytes) -> None:
        """Add complete lines. A damaged line counts as unanswered.

        Of several lines for one question, an answer counts before a failure, a later answer before an earlier one, and an earlier failure
        before a later one.
        """
        lines = [line for line in whole.split(b"\n") if line.strip()]
        documents = [document for line in lines if (document := _parse_answer(line)) is not None]
        if damaged := len(lines) - len(documents):
            logger.warning(f"{self.path.parent}: skipped {damaged} damaged line(s); their questions are answered again")
        for document in documents:
            key = document["task"], document["sample"]
            if "error" not in document or key not in self._lines:
                self._lines[key] = document

    @property
    def files(self) -> list[Path]:
        """Files that contain answers."""
        return [*self._others, *([self.path] if self.path.exists() else [])]

    def missing(self, wanted: Iterable[Question]) -> list[Question]:
        """Return the questions without an answer: those that are not stored, and those whose tries failed (a line with `error`)."""
        return [question for question in wanted if "error" in self._lines.get(_answer_key(question), {"error": ""})]

    def add(self, *answered: tuple[Question, Answer]) -> None:
        """Append answers durably with one flush. Blocks."""
        lines: dict[Key, _Document] = {
            _answer_key(question): {"task": question.task.index, **trace_line(answer)} for question, answer in answered
        }
        content = "".join(json.dumps(line, default=str) + "\n" for line in lines.values()).encode()
        with storage_errors(self.path.parent):
            self._append_bytes(content)
        self._lines |= lines

    def _append_bytes(self, content: bytes) -> None:
        is_new = not self.path.exists()
        if is_new:
            make_folder(self.path.parent)
        with self.path.open("ab", buffering=0) as file:
            durable, rest = file.tell(), memoryview(content)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fdatasync(file.fileno())
            except OSError:
                # Remove the part that was written. If this fails, too, the file is still valid: readers skip an incomplete line, and
                # count an answer only once if it is written again after a complete line.
                with suppress(OSError):
                    file.truncate(durable)
                raise
        if is_new:
            fsync_path(self.path.parent)

    def answers(self, wanted: Iterable[Question]) -> list[StoredAnswer]:
        """Return the stored answers to the questions in their order, without unanswered questions."""
        found = [self._lines.get(_answer_key(question)) for question in wanted]
        return [_answer_line(document) for document in found if document is not None]

    def first_error(self) -> str | None:
        """Return the error of the first question whose tries failed, or None."""
        return next((str(line["error"]) for line in self._lines.values() if "error" in line), None)


def _parse_answer(line: bytes) -> _Document | None:
    """Parse a stored answer, or return None if its line is damaged."""
    try:
        document = json.loads(line)
        _answer_line(document)
        return document if all(isinstance(document[name], int) for name in ("task", "sample")) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _file_name(text: str) -> str:
    """Convert a name to a part of a path. If two names give the same part, the digests of their files differ."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", text)
    return plain if plain.strip(".") else f"_{plain}"


def keep_answers(entries: Iterable[Entry]) -> None:
    """Store answers durably, with one flush per file. After a failure some answers may be stored; an answer that is
    stored twice counts once.
    """
    of_file: dict[AnswerFile, list[tuple[Question, Answer]]] = {}
    for file, question, answer in entries:
        of_file.setdefault(file, []).append((question, answer))
    for file, answered in of_file.items():
        file.add(*answered)


def _answer_key(question: Question) -> Key:
    return question.task.index, question.sample


Entry = tuple[AnswerFile, Question, Answer]
"""File, question, and the answer to store."""


def _answer_line(document: _Document) -> StoredAnswer:
    measured = None
    if "error" not in document:
        measured = Measured(
            reward=document["reward"],
            metrics=document["metrics"],
            truncated=document["truncated"],
            loss_tokens=document["completion_tokens"],  # the files' name for the number of sampled tokens
        )
    return StoredAnswer(
        document["environment"],
        document["task_id"],
        document["sample"],
        measured,
        document.get("messages", ()),
        tools=document.get("tools", ()),
    )
