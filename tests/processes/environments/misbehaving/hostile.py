"""Environment whose tasks are deeds in the middle of an episode: the id of a task names its deed."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import deadly_deeds  # noqa: F401
from deeds import EPISODES, IN_RUN, SCORES, OwnBaseException, deed

from rlrun.environments import Episode, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.process import worker

# ---- episodes and scores


def _nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@deed(EPISODES)
def nests_deeply() -> Any:
    sys.setrecursionlimit(1_000_000)
    return {"info": {"x": _nested(200_000)}}


@deed(EPISODES)
def holds_itself() -> Any:
    info: dict[str, Any] = {}
    info["self"] = info
    return {"info": info}


class Ghost(dict[str, Any]):
    def items(self) -> Any:
        return itertools.repeat(("a", 1))

    __iter__ = __len__ = __repr__ = keys = items


class Judge(Score):
    @property
    def reward(self) -> float:
        raise OwnBaseException("no reward")

    reward = reward.setter(lambda self, value: None)


class Float:
    def __float__(self) -> float:
        raise OwnBaseException("no number")


EPISODES |= {
    "brings_much_text": lambda: {"info": {"x": "x" * 20_000_000}},
    "brings_many_values": lambda: {"info": {"x": [0] * 1_100_000}},
    "brings_many_messages": lambda: {"messages": [{"role": "user", "content": ""}] * 20_000},
    "brings_nan": lambda: {"info": {"deep": [{"x": float("nan")}]}},
    "brings_a_huge_number": lambda: {"info": {"x": 10**10_000}},
    "brings_an_object": lambda: {"info": {"x": object()}},
    "brings_a_strange_key": lambda: {"info": {(1, 2): 3}},
    "brings_surrogates": lambda: {"info": {"x": "a\ud83d"}},
    "brings_no_messages": lambda: {"messages": "hello"},
    "brings_words_as_messages": lambda: {"messages": ["hello"]},
    "brings_a_generator": lambda: {"messages": itertools.repeat({"role": "user"})},
    "brings_a_fraction_of_a_reply": lambda: {"replies": 1.5},
    "brings_nothing": lambda: None,
    "brings_a_ghost": lambda: {"info": Ghost(a=1)},
}
SCORES |= {
    "scores_1e300": lambda: Score(1e300),
    "scores_float32_max": lambda: Score(-3.4e38),
    "scores_inf": lambda: Score(float("inf")),
    "scores_nan": lambda: Score(float("nan")),
    "scores_a_huge_integer": lambda: Score(10**400),
    "scores_text": lambda: Score("1"),  # type: ignore[arg-type]
    "scores_none": lambda: Score(None),  # type: ignore[arg-type]
    "scores_complex": lambda: Score(1j),  # type: ignore[arg-type]
    "scores_what_is_no_number": lambda: Score(Float()),  # type: ignore[arg-type]
    "scores_by_a_property": lambda: Judge(1.0),
    "scores_nothing": lambda: None,
    "scores_a_decimal": lambda: Score(Decimal("1")),  # type: ignore[arg-type]
    "measures_1e300": lambda: Score(1.0, {"x": 1e300}),
    "measures_inf": lambda: Score(1.0, {"x": float("-inf")}),
    "measures_too_much": lambda: Score(1.0, {f"x{i}": 1.0 for i in range(1000)}),
    "measures_without_names": lambda: Score(1.0, {None: 1.0}),  # type: ignore[dict-item]
    "measures_surrogates": lambda: Score(1.0, {"\ud800": 1.0}),
    "measures_a_list": lambda: Score(1.0, [1.0]),  # type: ignore[arg-type]
}


@deed(IN_RUN)
def breaks_what_all_use() -> None:
    def broken(*_: object) -> None:
        raise ValueError("its task list is gone")

    Hostile.score = broken  # type: ignore[method-assign,assignment]


def scores_slowly() -> Score:
    time.sleep(0.02)
    return Score(1.0)


SCORES["scores_slowly"] = scores_slowly


# ---- model requests

REQUESTS: dict[str, dict[str, Any]] = {
    "asks_with_a_generator": {"messages": itertools.repeat({"role": "user", "content": ""})},
    "asks_with_surrogates": {"messages": [{"role": "user", "content": "\udcff"}]},
    "asks_without_a_role": {"messages": [{"content": "hello"}]},
    "asks_with_much_text": {"messages": [{"role": "user", "content": "x" * 20_000_000}]},
    "asks_for_no_tokens": {"max_tokens": 0},
    "asks_for_half_a_token": {"max_tokens": 0.5},
    "asks_to_stop_at_letters": {"stop": "abc"},
    "asks_to_stop_at_nothing": {"stop": [""]},
    "asks_with_strange_tools": {"tools": [print]},
}
GOOD = ("good", "neighbour", "asks_without_end")
FEWER_REQUESTS = 300
"""Replacement of `bounds.MAX_REQUESTS` in this process: 10,000 requests and replies take 2 s of CPU time."""
NAMES = [*IN_RUN, *EPISODES, *SCORES, *REQUESTS, *GOOD]


class Hostile(SingleTurnEnvironment):
    id = "hostile"

    def tasks(self, split: Split) -> Sequence[Task]:
        names = NAMES if split == "train" else ["held-out"]
        return [Task(id=name, prompt=[{"role": "user", "content": name}]) for name in names]

    async def run(self, task: Task, model: Any) -> Any:
        if task.id in IN_RUN:
            done = IN_RUN[task.id]()
            if done is not None:
                await done
        if task.id == "asks_without_end":
            worker.MAX_REQUESTS = FEWER_REQUESTS
            while True:
                await model.complete(task.prompt)
        if asked := REQUESTS.get(task.id):
            await model.complete(
                asked.get("messages", task.prompt), **{k: v for k, v in asked.items() if k != "messages"}
            )
        episode = await super().run(task, model)
        if task.id in EPISODES:
            changes = EPISODES[task.id]()
            return changes if changes is None else Episode(**vars(episode) | changes)
        return episode

    async def score(self, task: Task, episode: Episode) -> Any:
        if task.id in SCORES:
            return SCORES[task.id]()
        return Score(1.0)


def hostile() -> Hostile:
    return Hostile()


def exits_at_start() -> None:
    sys.exit(4)


class _Lying(Hostile):
    """Environment whose names are not texts."""

    @property
    def id(self) -> str:  # type: ignore[override]
        raise OwnBaseException("no id")


def nameless() -> Hostile:
    return _Lying()


__all__ = ["NAMES", "exits_at_start", "hostile", "nameless"]
