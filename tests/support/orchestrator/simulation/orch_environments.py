"""Environments with deliberate faults, by import path."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rlrun.environments.bundled.small_tasks import ReverseText, ReverseTextArgs
from rlrun.environments.protocol import Episode, Score, Task


class Faulty(ReverseText):
    """Every episode's reward function raises."""

    async def score(self, task: Task, episode: Episode) -> Score:
        raise RuntimeError("the judge is on holiday")


class Constant(ReverseText):
    """Every reward is 1, so no group has variance."""

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


class Mortal(ReverseText):
    """Its process dies once, while other episodes wait for the model."""

    def __init__(self, marker: str) -> None:
        super().__init__(ReverseTextArgs())
        self.marker = Path(marker)

    async def score(self, task: Task, episode: Episode) -> Score:
        if not self.marker.exists():
            self.marker.touch()
            print("farewell")
            os._exit(9)
        return await super().score(task, episode)


def mortal(marker: str) -> Mortal:
    return Mortal(marker)


def faulty() -> Faulty:
    return Faulty(ReverseTextArgs())


def constant() -> Constant:
    return Constant(ReverseTextArgs())


class Graded(ReverseText):
    """A reward that depends only on the task: 0, 1/4, ... 1."""

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(sum(map(ord, task.id)) % 5 / 4)


def graded() -> Graded:
    return Graded(ReverseTextArgs(num_tasks=12))


class Ranked(ReverseText):
    """A single reply earns 0; in a group each earns the share of replies that sort before it."""

    compares = True
    held = False
    """No comparison ends while this is true."""
    waiting = 0
    """Number of waiting comparisons."""

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(0.0, {"alone": 1.0})

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> list[Score]:
        type(self).waiting += 1
        while type(self).held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        replies = [episode.last_reply for episode in episodes]
        return [
            Score(sum(other < reply for other in replies) / len(replies), score.metrics | {"size": len(replies)})
            for reply, score in zip(replies, scores, strict=True)
        ]


class Quarrelsome(Ranked):
    """Every comparison fails."""

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> list[Score]:
        raise RuntimeError("no two judges agree")


def ranked() -> Ranked:
    return Ranked(ReverseTextArgs())


def quarrelsome() -> Quarrelsome:
    return Quarrelsome(ReverseTextArgs())


class Wild(ReverseText):
    """Ten of 32 tasks give untrainable results and one ends the process; the others score the extremes."""

    async def score(self, task: Task, episode: Episode) -> Score:
        match int(task.id.split("-")[1]) % 16:
            case 0:
                return Score(1e300)
            case 1:
                return Score(1.0, {"x": 1e308})
            case 2 if task.id.split("-")[1] == "2":
                os._exit(9)
            case 3:
                raise BaseExceptionGroup("two", [GeneratorExit(), KeyboardInterrupt()])
            case 4:
                raise asyncio.CancelledError
            case 5:
                return Score(1.0, {"x": float("nan")})
            case number:
                return Score(1e9 if episode.last_reply > "c" else -1e9, {"x": 3e38, "\u00e9" * number: -3e38})


def wild() -> Wild:
    return Wild(ReverseTextArgs(num_tasks=32))
