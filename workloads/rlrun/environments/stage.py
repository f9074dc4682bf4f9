"""Interface through which the orchestrator plays an environment, in this process or in another one.

The orchestrator has only references to tasks; the tasks themselves stay in the process with the environment's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, overload

from rlrun.environments.bounds import clip_text, describe_exception, name_of
from rlrun.environments.episode import EpisodeError, ErrorKind, compare_group, run_episode
from rlrun.environments.protocol import (
    SPLITS,
    ComparesGroups,
    Environment,
    Episode,
    ModelClient,
    ReportsNotices,
    Score,
    Split,
    Task,
    TellsTurns,
)
from rlrun.environments.splits import check_distinct, check_prompts, needs_proof

MAX_NOTICES = 20
"""Largest number of notices of one environment."""


@dataclass(frozen=True)
class TaskRef:
    """Reference to the task at a position of a split."""

    split: Split
    index: int

    def __str__(self) -> str:
        return f"{self.split}[{self.index}]"


class TaskRefs(Sequence[TaskRef]):
    """References to all tasks of a split."""

    def __init__(self, split: Split, count: int) -> None:
        self._split, self._count = split, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> TaskRef: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskRef]: ...
    def __getitem__(self, index: int | slice) -> TaskRef | Sequence[TaskRef]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"task {index} of {self._count}")
        return TaskRef(self._split, position)


@dataclass(frozen=True)
class Played:
    """A successful episode with its score."""

    task_id: str
    episode: Episode
    score: Score


class Stage(Protocol):
    """Interface that plays the episodes of one environment, many at once."""

    @property
    def id(self) -> str:
        """Name of the environment in errors."""
        ...

    @property
    def single_turn(self) -> bool:
        """Whether every episode sends one request to the model, with the unchanged prompt of the task."""
        ...

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        """Return references to the tasks of a split."""
        ...

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode and score it; see `run_episode` for the deadlines. Raises `EpisodeError`."""
        ...

    @property
    def compares(self) -> bool:
        """Whether `compare` returns the final rewards of a group."""
        ...

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        """Compare the played episodes of a group and return their final scores, in the order of the episodes.

        Args:
            task: task of the group.
            group: episodes and scores; only `messages` and `replies` of the episodes are used.
            timeout_seconds: limit for the comparison, including the wait for its turn. Restarts of the environment's process that
                other episodes cause do not count.
            reward_seconds: limit for the comparison itself.

        Raises:
            EpisodeError: the comparison failed, so the group has no rewards.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the stage itself, by short names."""
        ...


class InProcessStage:
    """Stage in this process and event loop. The worker process of an environment uses it, see `process.worker`.

    Raises:
        Exception: any exception of the environment's `tasks`.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tasks = {split: environment.tasks(split) for split in SPLITS}
        self._id = name_of(environment)
        self._played: dict[str, TaskRef] = {}
        """First reference to each played task whose id cannot be checked in advance, by id."""
        self._digests: dict[Split, str] = {}
        self._sizes = {split: len(tasks) for split, tasks in self._tasks.items()}
        self._single_turn = isinstance(environment, TellsTurns) and environment.single_turn is True
        self._comparing = (
            environment if isinstance(environment, ComparesGroups) and environment.compares is True else None
        )

    @property
    def id(self) -> str:
        return self._id

    @property
    def single_turn(self) -> bool:
        return self._single_turn

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        return TaskRefs(split, self._sizes[split])

    @property
    def compares(self) -> bool:
        return self._comparing is not None

    @property
    def digests(self) -> dict[Split, str]:
        """Digest of each split's tasks, see `check_distinct`. Empty before `check_tasks`."""
        return self._digests

    @property
    def notices(self) -> list[str]:
        """Notices of the environment about its data, at most `MAX_NOTICES`."""
        if not isinstance(self._environment, ReportsNotices):
            return []
        return [clip_text(str(notice)) for notice in islice(self._environment.notices, MAX_NOTICES)]

    def check_tasks(self) -> None:
        """Check the tasks that can be read without running code of the environment.

        Raises:
            DuplicateTaskError: tasks are not distinct.
            PromptError: a single-turn task has a prompt that cannot be sent to a model.
        """
        self._digests = check_distinct(self._tasks)
        if self._single_turn:
            check_prompts(self._tasks)

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        problem = self._copy_task(task)
        if needs_proof(self._tasks[task.split]):
            self._refuse_known_id(task, name_of(problem))
        episode, score = await run_episode(
            self._environment, problem, model, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds
        )
        return Played(name_of(problem), episode, score)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        problem = self._copy_task(task)
        if self._comparing is None:
            raise EpisodeError("reward", self.id, name_of(problem), "this environment does not compare groups")
        episodes, scores = [played.episode for played in group], [played.score for played in group]
        seconds = min(timeout_seconds, reward_seconds)
        return await compare_group(self._comparing, problem, episodes, scores, reward_seconds=seconds)

    def _copy_task(self, task: TaskRef) -> Task:
        """Return a copy of the task: an environment may append to the prompt, and the episodes of a group run at the same time."""
        doing = "reading"
        try:
            problem = self._tasks[task.split][task.index]
            doing = "copying"
            return deepcopy(problem)
        except BaseException as error:
            message = f"{doing} the task raised {describe_exception(error)}"
            # Unusable rows raise ValueError and fail again. Other errors, such as those of a network, may be temporary.
            kind: ErrorKind = "task" if doing == "reading" and issubclass(type(error), ValueError) else "environment"
            raise EpisodeError(kind, self.id, str(task), message) from error

    def _refuse_known_id(self, task: TaskRef, id: str) -> None:
        if (first := self._played.setdefault(id, task)) != task:
            message = f"{first} and {task} have the same id; give each task a different id, across both splits"
            raise EpisodeError("environment", self.id, id, message)

    def metrics(self) -> dict[str, float]:
        return {}
