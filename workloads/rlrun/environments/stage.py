"""Interface of an environment for the orchestrator, wherever the environment's code runs.

The orchestrator holds no task, only references to them: the tasks themselves stay with the environment's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, overload

from rlrun.environments.bounds import clip_text, describe_exception, name_of
from rlrun.environments.distinct import check_distinct, check_prompts, needs_proof
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

MAX_NOTICES = 20
"""Most notices of one environment."""


@dataclass(frozen=True)
class TaskRef:
    """The task at a position of a split."""

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
    """An episode that can be trained on."""

    task_id: str
    episode: Episode
    score: Score


class Stage(Protocol):
    """Plays the episodes of one environment, many at once."""

    @property
    def id(self) -> str:
        """Name of the environment in errors."""
        ...

    @property
    def single_turn(self) -> bool:
        """True if every episode asks the model once, and with the task's prompt as it is."""
        ...

    def tasks(self, split: Split) -> Sequence[TaskRef]:
        """The split's tasks."""
        ...

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        """Play one episode and score it; see `run_episode` for the deadlines. Raises `EpisodeError`."""
        ...

    @property
    def compares(self) -> bool:
        """True if the rewards of a group are those that `compare` gives."""
        ...

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        """Compare the played episodes of a group: the scores that count, in their order.

        Args:
            task: of the group.
            group: its episodes and scores; only `messages` and `replies` of the episodes are looked at.
            timeout_seconds: until the comparison is done, its turn included; a restart of the environment's process by others is not.
            reward_seconds: for the comparison alone.

        Raises:
            EpisodeError: the group has no rewards.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the place itself, by short names."""
        ...


class InProcessStage:
    """Plays in this process and event loop: the inside of an environment's own process, see `process.worker`.

    Raises:
        Exception: whatever the environment raises when it is asked for its tasks.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tasks = {split: environment.tasks(split) for split in SPLITS}
        self._id = name_of(environment)
        self._played: dict[str, TaskRef] = {}
        """Tasks that were not at hand to be checked, by id."""
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
        """Digest of each split's tasks, see `check_distinct`; empty before `check_tasks`."""
        return self._digests

    @property
    def notices(self) -> list[str]:
        """Notices of the environment about its data."""
        if not isinstance(self._environment, ReportsNotices):
            return []
        return [clip_text(str(notice)) for notice in islice(self._environment.notices, MAX_NOTICES)]

    def check_tasks(self) -> None:
        """Check the tasks that are at hand.

        Raises:
            SharedTaskError: tasks are not distinct.
            PromptError: a task of single turns has a prompt that no model can be asked.
        """
        self._digests = check_distinct(self._tasks)
        if self._single_turn:
            check_prompts(self._tasks)

    async def play(self, task: TaskRef, model: ModelClient, *, timeout_seconds: float, reward_seconds: float) -> Played:
        problem = self._problem(task)
        if needs_proof(self._tasks[task.split]):
            self._refuse_known_id(task, name_of(problem))
        episode, score = await run_episode(
            self._environment, problem, model, timeout_seconds=timeout_seconds, reward_seconds=reward_seconds
        )
        return Played(name_of(problem), episode, score)

    async def compare(
        self, task: TaskRef, group: Sequence[Played], *, timeout_seconds: float, reward_seconds: float
    ) -> list[Score]:
        problem = self._problem(task)
        if self._comparing is None:
            raise EpisodeError("reward", self.id, name_of(problem), "it compares no groups")
        episodes, scores = [played.episode for played in group], [played.score for played in group]
        seconds = min(timeout_seconds, reward_seconds)
        return await compare_group(self._comparing, problem, episodes, scores, reward_seconds=seconds)

    def _problem(self, task: TaskRef) -> Task:
        """Return a copy of the task: an environment may append to the prompt, and the rollouts of a group run at the same time."""
        doing = "reading"
        try:
            problem = self._tasks[task.split][task.index]
            doing = "copying"
            return deepcopy(problem)
        except BaseException as error:
            message = f"{doing} the task raised {describe_exception(error)}"
            # Rows that cannot be used raise ValueError; other errors, such as those of a network, may pass.
            kind: ErrorKind = "task" if doing == "reading" and issubclass(type(error), ValueError) else "environment"
            raise EpisodeError(kind, self.id, str(task), message) from error

    def _refuse_known_id(self, task: TaskRef, id: str) -> None:
        if (first := self._played.setdefault(id, task)) != task:
            message = f"{first} and {task} have this id; give each task an id of its own, in both splits together"
            raise EpisodeError("environment", self.id, id, message)

    def metrics(self) -> dict[str, float]:
        return {}
