"""Environments that misbehave on purpose, by import path."""

from __future__ import annotations

import os
from pathlib import Path

from rlrun.environments.protocol import Episode, Score, Task
from rlrun.environments.reverse_text import ReverseText, ReverseTextArgs


class Faulty(ReverseText):
    """Every episode's reward function raises."""

    async def score(self, task: Task, episode: Episode) -> Score:
        raise RuntimeError("the judge is on holiday")


class Constant(ReverseText):
    """Every reward is 1: no group has variance."""

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(1.0)


class Mortal(ReverseText):
    """Its process dies once, while others of its episodes wait for the model."""

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
    """A reward that depends on nothing but the task: 0, 1/4, ... 1."""

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(sum(map(ord, task.id)) % 5 / 4)


def graded() -> Graded:
    return Graded(ReverseTextArgs(num_tasks=12))
