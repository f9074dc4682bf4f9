"""Play one episode with a deadline, and classify its failures by their cause."""

from __future__ import annotations

from asyncio import CancelledError, current_task, timeout
from collections.abc import Iterator, Sequence
from typing import Literal

from rlrun.environments.bounds import BoundsError, describe_exception, name_of, plain_episode, plain_score
from rlrun.environments.protocol import (
    ComparesGroups,
    Environment,
    Episode,
    Message,
    ModelClient,
    Reply,
    Score,
    Task,
    Tool,
    UnplayableTaskError,
)

ErrorKind = Literal["timeout", "model", "environment", "reward", "task", "crash", "hang", "memory"]
"""Cause of a failed episode.

`timeout`: the deadline passed. `model`: the model client raised. `environment`: `run` raised, or did not return an episode.
`reward`: `score` raised, or its numbers are unusable. `task`: the task's own data cannot be read, played or scored.
The other kinds mean that the environment's process ended together with all its episodes: `crash` (the process exited or was killed),
`hang` (it stopped answering), `memory` (it used too much memory)."""


class EpisodeError(Exception):
    """Failure of an episode, which then cannot be trained on. The original exception is chained if there is one.

    Args:
        kind: cause of the failure.
        env_id: environment of the episode.
        task_id: id of the task, or its position if the id is unknown.
        message: description of the failure.
        death: number of the end of the environment's process that ended this episode, counted from 1; 0 if the process did not end.
        bystander: whether the code of another episode was running when the process ended.
    """

    def __init__(
        self, kind: ErrorKind, env_id: str, task_id: str, message: str, *, death: int = 0, bystander: bool = False
    ) -> None:
        super().__init__(f"environment {env_id!r}, task {task_id!r}: {message}")
        self.death = death
        self.bystander = bystander
        self.kind = kind
        self.env_id = env_id
        self.task_id = task_id
        self.message = message


async def run_episode(
    env: Environment, task: Task, model: ModelClient, *, timeout_seconds: float, reward_seconds: float | None = None
) -> tuple[Episode, Score]:
    """Play one episode and score it within `timeout_seconds` of wall-clock time, and score it within `reward_seconds`.

    Every exception of the environment becomes an error of this episode, including `SystemExit` and a `CancelledError` of its own.
    The deadline can interrupt an environment only at an `await`. Code that computes without awaiting blocks the whole event loop, so
    heavy work belongs into a thread or a process.

    Returns:
        Episode and score in plain types, within the limits of `bounds`.

    Raises:
        EpisodeError: the episode failed and cannot be trained on.
        CancelledError: the caller's task was cancelled.
    """
    watched = _WatchedModel(model)
    doing: _Doing = "run()"
    deadline, scoring = timeout(timeout_seconds), timeout(reward_seconds)
    try:
        async with deadline:
            episode = await env.run(task, watched)
            doing = "episode"
            _check_result(episode)
            doing = "score()"
            async with scoring:
                score = await env.score(task, episode)
        doing = "numbers"
        if not issubclass(type(score), Score):
            raise BoundsError(f"score() must return a Score, not {type(score).__name__}")
        checked = plain_score(score)
        doing = "episode"
        return plain_episode(episode), checked
    except BaseException as error:
        this = current_task()
        if isinstance(error, CancelledError) and this is not None and this.cancelling():
            raise
        late = timeout_seconds if deadline.expired() else reward_seconds if scoring.expired() else None
        kind, message = _sort_exception(
            error, doing, late, of_score=not deadline.expired(), of_model=watched.raised_in(error)
        )
        raise EpisodeError(kind, name_of(env), name_of(task), message) from error


async def compare_group(
    env: ComparesGroups, task: Task, episodes: Sequence[Episode], scores: Sequence[Score], *, reward_seconds: float
) -> list[Score]:
    """Compare the scored episodes of one group, within `reward_seconds` of wall-clock time.

    Returns:
        Final scores, one for each episode, within the limits of `bounds`.

    Raises:
        EpisodeError: the group has no rewards; kind `reward` or `timeout`.
        CancelledError: the caller's task was cancelled.
    """
    doing: _Doing = "compare()"
    deadline = timeout(reward_seconds)
    try:
        async with deadline:
            found = list(await env.compare(task, episodes, scores))
        doing = "numbers"
        if len(found) != len(episodes) or not all(issubclass(type(score), Score) for score in found):
            raise BoundsError(f"compare() must return a list of {len(episodes)} Scores, one for each episode")
        return [plain_score(score) for score in found]
    except BaseException as error:
        this = current_task()
        if isinstance(error, CancelledError) and this is not None and this.cancelling():
            raise
        late = reward_seconds if deadline.expired() else None
        kind, message = _sort_exception(error, doing, late, of_score=True, of_model=False)
        raise EpisodeError(kind, name_of(env), name_of(task), message) from error


_Doing = Literal["run()", "episode", "score()", "compare()", "numbers"]


def _sort_exception(
    error: BaseException, doing: _Doing, late: float | None, *, of_score: bool, of_model: bool
) -> tuple[ErrorKind, str]:
    """Return the kind of a failure and its message.

    Args:
        error: exception of the environment.
        doing: step that raised it.
        late: seconds of the deadline that has passed, or None.
        of_score: whether the passed deadline is the one of the score.
        of_model: whether the model client raised the exception.
    """
    if late is not None and isinstance(error, TimeoutError):
        if of_score:
            return "timeout", f"{doing} did not finish within {round(late, 3):g} seconds"
        return "timeout", f"{doing} did not finish: the episode's {round(late, 3):g} seconds were over"
    if of_model:
        return "model", f"the model client failed: {describe_exception(error)}"
    if unplayable := next(
        (cause for cause in _exception_causes(error) if issubclass(type(cause), UnplayableTaskError)), None
    ):
        return "task", f"{doing} raised {describe_exception(unplayable)}"
    kind: ErrorKind = "reward" if doing in ("score()", "compare()", "numbers") else "environment"
    if doing in ("episode", "numbers"):
        return kind, str(error) if isinstance(
            error, BoundsError
        ) else f"the returned value raised {describe_exception(error)}"
    if isinstance(error, CancelledError):
        return kind, f"{doing} raised CancelledError, although the episode was not cancelled"
    return kind, f"{doing} raised {describe_exception(error)}"


def _check_result(episode: Episode) -> None:
    if not issubclass(type(episode), Episode):
        raise BoundsError(f"run() must return an Episode with at least one reply, not {type(episode).__name__}")
    if type(episode.replies) is int and episode.replies < 1:
        raise BoundsError(f"run() must return an Episode with at least one reply, not {episode.replies} replies")


class _WatchedModel:
    """Model client that records the wrapped client's exception, so that a failing engine is not reported as the environment's fault."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model
        self._error: Exception | None = None

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        # `tools` is passed only if the environment uses tools, so that clients without that parameter work for other environments.
        offered = {} if tools is None else {"tools": tools}
        try:
            return await self._model.complete(messages, max_tokens=max_tokens, stop=stop, **offered)
        except BoundsError:
            raise  # the request was rejected before it reached the client
        except Exception as error:
            self._error = error
            raise

    def raised_in(self, error: BaseException) -> bool:
        """Return whether `error` is the client's exception, was caused by it, or is a group that contains it."""
        return self._error is not None and any(cause is self._error for cause in _exception_causes(error))


def _exception_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once: user code can chain exceptions in a circle."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting.append(found.__context__ if found.__cause__ is None else found.__cause__)
        if isinstance(found, BaseExceptionGroup):
            waiting += found.exceptions
