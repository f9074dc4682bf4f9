"""`run_episode`: its deadline, and the kinds of failures."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import pytest

from rlrun.environments import Episode, EpisodeError, Score, SingleTurnEnvironment, Split, Task, run_episode
from tests.support.waiting import UNREACHED_SECONDS

TASK = Task(id="train-7", prompt=[{"role": "user", "content": "?"}])


class Probe(SingleTurnEnvironment):
    """An environment with `run` and `score` of the test."""

    id = "probe"

    def __init__(self, *, run: Any = None, score: Any = 1.0, metrics: dict[str, Any] | None = None) -> None:
        self._run, self._score, self._metrics = run, score, metrics or {}

    def tasks(self, split: Split) -> Sequence[Task]:
        return [TASK]

    async def run(self, task: Task, model: Any) -> Episode:
        return await self._run(task, model) if self._run else await super().run(task, model)

    async def score(self, task: Task, episode: Episode) -> Score:
        return await self._score() if callable(self._score) else Score(self._score, self._metrics)


async def forever(*_: Any) -> Any:
    await asyncio.Event().wait()


async def boom(*_: Any) -> Any:
    raise KeyError("row 9")


async def own_timeout(*_: Any) -> Any:
    raise TimeoutError("the tool server is slow")


async def nothing(*_: Any) -> Any:
    return None


async def silent(task: Task, _: Any) -> Any:
    return Episode(task.prompt, 0)


async def wraps_the_models_error(task: Task, model: Any) -> Any:
    try:
        await model.complete(task.prompt)
    except ConnectionError as error:
        raise RuntimeError("no reply") from error


async def swallows_the_models_error(task: Task, model: Any) -> Any:
    with contextlib.suppress(ConnectionError):
        await model.complete(task.prompt)
    raise KeyError("row 9")


async def test_good_episode_returns_plain_floats(scripted: Any) -> None:
    episode, score = await run_episode(
        Probe(score=1, metrics={"n": 2}), TASK, scripted(["hi"]), timeout_seconds=UNREACHED_SECONDS
    )
    assert episode.messages == [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hi"}]
    assert episode.info == {"finish_reason": "stop", "truncated": False}
    assert (score, type(score.reward), type(score.metrics["n"])) == (Score(1.0, {"n": 2.0}), float, float)


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        (Probe(run=forever), "timeout", r"run\(\) did not finish: the episode's 0.1 seconds"),
        (Probe(score=forever), "timeout", r"score\(\) did not finish"),
        (Probe(run=boom), "environment", "KeyError: 'row 9'"),
        (Probe(run=own_timeout), "environment", "the tool server is slow"),
        (Probe(run=nothing), "environment", "not NoneType"),
        (Probe(run=silent), "environment", "not 0 replies"),
        (Probe(run=swallows_the_models_error), "environment", "row 9"),
        (Probe(run=wraps_the_models_error), "model", "no reply"),
        (Probe(), "model", "engine gone"),
    ],
)
async def test_failure_has_kind_of_its_cause(env: Probe, kind: str, says: str, scripted: Any) -> None:
    script = ["hi"] if env._score is forever else [ConnectionError("engine gone")]
    with pytest.raises(EpisodeError, match=says) as caught:
        await run_episode(env, TASK, scripted(script), timeout_seconds=0.1 if kind == "timeout" else UNREACHED_SECONDS)
    error = caught.value
    assert (error.kind, error.env_id, error.task_id) == (kind, "probe", "train-7")
    assert str(error).startswith("environment 'probe', task 'train-7': ")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Probe(score=math.nan), "the reward must be a finite number, not nan"),
        (Probe(score=math.inf), "the reward must be a finite number, not inf"),
        (Probe(score=None), "the reward must be a finite number, not None"),
        (Probe(score="1"), "the reward must be a finite number, not '1'"),
        (Probe(metrics={"speed": -math.inf}), "metric 'speed' must be a finite number"),
        (Probe(score=nothing), "must return a Score, not NoneType"),
        (Probe(score=boom), r"score\(\) raised KeyError: 'row 9'"),
    ],
)
async def test_unusable_scores_name_the_environment(env: Probe, says: str, scripted: Any) -> None:
    with pytest.raises(EpisodeError, match=says) as caught:
        await run_episode(env, TASK, scripted(["hi"]), timeout_seconds=UNREACHED_SECONDS)
    assert caught.value.kind == "reward"
    assert "'probe'" in str(caught.value)


async def test_cancellation_is_not_an_episode_error(scripted: Any) -> None:
    playing = asyncio.create_task(
        run_episode(Probe(run=forever), TASK, scripted([]), timeout_seconds=UNREACHED_SECONDS)
    )
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
