"""Comparisons of groups in an environment's process: a failure affects only its group."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlrun.environments import Episode, EpisodeError, Score
from rlrun.environments.process import supervised, talk
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.stage import Played
from tests.support.programs import wait_for_async
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS

LIMITS = Limits(
    start_seconds=UNREACHED_SECONDS, memory_bytes=400 * 1024**2, hang_seconds=UNREACHED_SECONDS, look_seconds=0.05
)
sys.path.insert(0, FOLDER := str(Path(__file__).parent / "misbehaving"))
from comparing import DEEDS  # noqa: E402


@asynccontextmanager
async def run_environment(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IsolatedEnvironment]:
    monkeypatch.setenv("PYTHONPATH", before(FOLDER))
    monkeypatch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.01)
    environment = IsolatedEnvironment("comparing", Command("comparing:comparing", {}), LIMITS, [Log(None)])
    await environment.start()
    supervising = asyncio.create_task(environment.run())
    try:
        yield environment
    finally:
        supervising.cancel()
        environment.close()


async def compare_group(environment: IsolatedEnvironment, deed: str, seconds: float = UNREACHED_SECONDS) -> list[Score]:
    group = [
        Played("t", Episode([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], 1), Score(1.0))
        for reply in ("a", "bcd")
    ]
    task = environment.tasks("train")[DEEDS.index(deed)]
    return await environment.compare(task, group, timeout_seconds=UNREACHED_SECONDS, reward_seconds=seconds)


async def test_failed_comparison_is_an_error_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_environment(monkeypatch) as environment:
        assert environment.compares
        right = [Score(2.0, {"own": 1.0}), Score(4.0, {"own": 1.0})]
        assert await compare_group(environment, "good") == right
        for deed, seconds, kind, says in (
            ("sleeps", 0.2, "timeout", "compare\\(\\) did not finish within 0.2 seconds"),
            ("one_too_few", UNREACHED_SECONDS, "reward", "must return a list of 2 Scores"),
            ("infinite", UNREACHED_SECONDS, "reward", "the reward must be a finite number, not inf"),
            ("computes", UNREACHED_SECONDS, "hang", "comparing.py"),
            ("exits", UNREACHED_SECONDS, "crash", "exited with code 3"),
        ):
            if (
                kind == "hang"
            ):  # Only a hang needs a short limit: all other deeds return in time, even on a busy machine.
                environment.workers[0].life.limits = replace(LIMITS, hang_seconds=2.0)
            with pytest.raises(EpisodeError, match=says) as caught:
                await compare_group(environment, deed, seconds)
            assert caught.value.kind == kind
        assert await compare_group(environment, "good") == right
        assert environment.metrics()["restarts"] == 2


async def test_cancelled_comparison_ends_and_oversized_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_environment(monkeypatch) as environment:
        waiting = asyncio.create_task(compare_group(environment, "sleeps"))
        await wait_for_async(lambda: environment.workers[0].life.in_flight, "the comparison runs")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert environment.workers[0].life.in_flight == 0
        monkeypatch.setattr(talk, "MAX_LINE_BYTES", 100)
        with pytest.raises(EpisodeError, match=r"the group's episodes have \d+ bytes as JSON \(at most 100\)"):
            await compare_group(environment, "good")
