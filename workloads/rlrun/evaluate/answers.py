"""Answers on the disk: one file per policy and environment, a line per answer, appended as they come.

The file's name holds a fingerprint of all that an answer depends on. What has changed is therefore asked anew, into another file, and what
has not is never asked again, however often a command is interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlrun.config.rollout import EnvironmentConfig, SamplingConfig
from rlrun.environments.protocol import Split
from rlrun.evaluate.policies import Policy
from rlrun.orchestrator.evaluation import Answer, Question, trace_line
from rlrun.protocol.failures import storage_errors

Key = tuple[int, int]
"""Position of the task in its split, and number of the sample."""


@dataclass(frozen=True)
class Measured:
    """What is measured of a rollout in a file; see `rlrun.orchestrator.evaluation.Judged`."""

    reward: float
    metrics: Mapping[str, float]
    truncated: bool
    loss_tokens: int


@dataclass(frozen=True)
class Line:
    """An answer in a file; see `rlrun.orchestrator.evaluation.Answered`."""

    environment: str
    task_id: str
    sample: int
    rollout: Measured | None
    messages: Sequence[Mapping[str, Any]] = ()


def fingerprint(
    policy: Policy, environment: EnvironmentConfig, sampling: SamplingConfig, *, seq_len: int, split: Split
) -> str:
    """12 hex digits over what an answer depends on: deadlines and limits are none of it."""
    document = {
        "policy": [policy.step, policy.identity],
        "environment": [environment.label, environment.id, environment.args, environment.python],
        "sampling": sampling.model_dump(mode="json"),
        "seq_len": seq_len,
        "split": split,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


class AnswerFile:
    """The answers of one policy to one environment's tasks; the only writer of its file.

    Args:
        path: the file; made with the first answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[Key, dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        for line in whole.splitlines():
            if line.strip():
                document = json.loads(line)
                self._lines[document["task"], document["sample"]] = document
        if torn:  # of a writer that was killed: what follows must not stand behind it
            with storage_errors(path.parent):
                os.truncate(path, len(content) - len(torn))

    @classmethod
    def of(cls, folder: Path, policy: Policy, environment: EnvironmentConfig, digest: str) -> Self:
        """The file in a folder of answers."""
        label = re.sub(r"[^A-Za-z0-9._-]+", "_", environment.label)
        return cls(folder / policy.name.replace(" ", "_") / f"{label}.{digest}.jsonl")

    def missing(self, wanted: Iterable[Question]) -> list[Question]:
        """The questions without an answer; those whose tries have failed are among them."""
        return [question for question in wanted if "error" in self._lines.get(_key(question), {"error": ""})]

    def add(self, question: Question, answer: Answer) -> None:
        """Append one answer. It is in the kernel's hands when this returns, so that it outlives this process."""
        index, sample = _key(question)
        line = {"task": index} | trace_line(answer)
        self._lines[index, sample] = line
        with storage_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")

    def answers(self, wanted: Iterable[Question]) -> list[Line]:
        """What is known of the questions, in their order; those never asked are left out."""
        found = [self._lines.get(_key(question)) for question in wanted]
        return [_line(document) for document in found if document is not None]

    def first_error(self) -> str | None:
        """Why an answer failed, if one did."""
        return next((str(line["error"]) for line in self._lines.values() if "error" in line), None)


def _key(question: Question) -> Key:
    return question.task.index, question.sample


def _line(document: Mapping[str, Any]) -> Line:
    measured = None
    if "error" not in document:
        measured = Measured(
            reward=document["reward"],
            metrics=document["metrics"],
            truncated=document["truncated"],
            loss_tokens=document["completion_tokens"],
        )
    return Line(
        document["environment"], document["task_id"], document["sample"], measured, document.get("messages", ())
    )
