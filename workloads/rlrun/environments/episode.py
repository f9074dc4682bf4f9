"""One episode with a deadline, and its failures sorted by who is to blame."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal

from rlrun.environments.protocol import Environment, Episode, Message, ModelClient, Reply, Score, Task, Tool

ErrorKind = Literal["timeout", "model", "environment", "reward", "crash", "hang", "memory"]
"""`timeout`: the deadline passed. `model`: the model client raised. `environment`: `run` raised or returned no episode.
`reward`: `score` raised or its numbers are unusable. The others are the end of the environment's process, which takes
all its episodes with it: `crash` (it exited or was killed), `hang` (it stopped answering), `memory` (it took too much)."""


class EpisodeError(Exception):
    """An episode that yields nothing to train on. The cause, when there is one, is chained.

    Args:
        kind: what went wrong.
        env_id: the environment.
        task_id: the task, or its position where its id is not known.
        message: what happened.
        death: which end of the environment's process took the episode along, counted from 1; 0: none.
    """

    def __init__(self, kind: ErrorKind, env_id: str, task_id: str, message: str, *, death: int = 0) -> None:
        super().__init__(f"environment {env_id!r}, task {task_id!r}: {message}")
        self.death = death
        self.kind = kind
        self.env_id = env_id
        self.task_id = task_id
        self.message = message


async def run_episode(
    env: Environment, task: Task, model: ModelClient, *, timeout_seconds: float, reward_seconds: float | None = None
) -> tuple[Episode, Score]:
    """Play one episode and score it, both within `timeout_seconds` of wall-clock time, the score within `reward_seconds`.

    Raises `EpisodeError`. Cancellation passes through untouched. The deadline interrupts an environment where it
    awaits; one that computes without awaiting holds up its whole event loop, so heavy work belongs into a thread or
    a process.
    """
    watched = _WatchedModel(model)
    stage = "run"
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            episode = await env.run(task, watched)
            if not isinstance(episode, Episode) or episode.replies < 1:
                found = f"{episode.replies} replies" if isinstance(episode, Episode) else type(episode).__name__
                raise EpisodeError(
                    "environment", env.id, task.id, f"run() must return an Episode with at least one reply, not {found}"
                )
            stage = "score"
            async with asyncio.timeout(reward_seconds) as scoring:
                score = _checked(await env.score(task, episode), env.id, task.id)
    except EpisodeError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            message = f"{stage}() did not finish: the episode's {timeout_seconds:g} seconds were over"
            raise EpisodeError("timeout", env.id, task.id, message) from error
        if isinstance(error, TimeoutError) and stage == "score" and scoring.expired():
            message = f"score() did not finish within {reward_seconds:g} seconds"
            raise EpisodeError("timeout", env.id, task.id, message) from error
        if watched.raised_in(error):
            raise EpisodeError("model", env.id, task.id, f"the model client failed: {_describe(error)}") from error
        kind: ErrorKind = "reward" if stage == "score" else "environment"
        raise EpisodeError(kind, env.id, task.id, f"{stage}() raised {_describe(error)}") from error
    return episode, score


def _checked(score: Score, env_id: str, task_id: str) -> Score:
    if not isinstance(score, Score):
        raise EpisodeError("reward", env_id, task_id, f"score() must return a Score, not {type(score).__name__}")
    for name, value in {"reward": score.reward, **{f"metric {k!r}": v for k, v in score.metrics.items()}}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EpisodeError("reward", env_id, task_id, f"the {name} must be a finite number, not {value!r}")
    return Score(reward=float(score.reward), metrics={name: float(value) for name, value in score.metrics.items()})


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _WatchedModel:
    """Remembers what the model client raised, so that a failing engine is not held against the environment."""

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
        # Only what was asked for, so that a client that knows no tools serves environments that use none.
        offered = {} if tools is None else {"tools": tools}
        try:
            return await self._model.complete(messages, max_tokens=max_tokens, stop=stop, **offered)
        except Exception as error:
            self._error = error
            raise

    def raised_in(self, error: BaseException | None) -> bool:
        """Whether `error` is the client's own exception or was raised because of it."""
        while error is not None:
            if error is self._error:
                return True
            error = error.__cause__ or error.__context__
        return False
