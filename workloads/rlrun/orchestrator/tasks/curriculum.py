"""Curriculum of one environment: the order of its tasks, and pools of tasks that are easy or hard for the policy.

The order is stateless and pure: turns by weights, and a permutation of any length, computed for one position at a
time. The state of the pools and the walk is JSON.

The walk visits the open tasks once per epoch and skips those in a pool. Each pool gets its share of the draws, and
its least recently drawn task comes first. If all open tasks are in pools, the hard pool is drawn from, then the easy
one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypedDict

from rlrun.config.models.rollout import CurriculumConfig

_ROUNDS = 4


def share_out(number: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the owner of turn `number`, and the number of its earlier turns.

    The weights form a binary tree. At each fork the left side has got `floor(number·share)` of the first `number`
    turns, so that both results depend only on `number`.
    """
    low, high = 0, len(weights)
    while high - low > 1:
        middle = (low + high) // 2
        left = sum(weights[low:middle], Fraction(0))
        share = left / (left + sum(weights[middle:high], Fraction(0)))
        before, after = int(number * share), int((number + 1) * share)
        if after > before:
            number, high = before, middle
        else:
            number, low = number - before, middle
    return low, number


def _mix_bits(key: bytes, value: int) -> int:
    digest = hashlib.blake2b(value.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def permute_position(position: int, size: int, key: str) -> int:
    """Return the image of `position` in a pseudo-random permutation of `range(size)`.

    The permutation is a Feistel network over the next even number of bits. Results outside of the range are permuted
    again ("cycle walking", Black & Rogaway 2002), fewer than four times on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [hashlib.blake2b(f"{key}/{i}".encode(), digest_size=16).digest() for i in range(_ROUNDS)]
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_key in keys:
            left, right = right, left ^ (_mix_bits(round_key, right) & mask)
        value = (left << half) | right
        if value < size:
            return value


Pool = Literal["easy", "hard"]
_LOOKS = 1000
"""Limit of consecutive tasks that the walk skips, which bounds the time of one draw."""


def pool_of(mean: float, config: CurriculumConfig) -> Pool | None:
    """Return the pool of a task from the mean reward of its last group, or None."""
    if config.easy is not None and mean >= config.easy.threshold:
        return "easy"
    if config.hard is not None and mean <= config.hard.threshold:
        return "hard"
    return None


class CurriculumState(TypedDict):
    """State of `TaskPools` in a checkpoint."""

    epoch: int
    position: int
    window: int
    drawn: int
    easy: list[int]
    hard: list[int]


@dataclass
class TaskPools:
    """Pool of each task, and the position of the walk.

    Args:
        config: curriculum of the environment.
        size: number of tasks.
        key: seed of the order.
    """

    config: CurriculumConfig
    size: int
    key: str
    epoch: int = 0
    position: int = 0
    """Position of the walk within its epoch."""
    window: int = 0
    """Number of open tasks at the start of the list; 0 before the first draw."""
    drawn: int = 0
    """Number of draws."""
    _pools: dict[Pool, dict[int, None]] = field(default_factory=lambda: {"easy": {}, "hard": {}})
    """Tasks of each pool, the least recently drawn first."""

    def draw(self, step: int) -> tuple[int, int]:
        """Return the next task and its epoch for a group of `step`."""
        self._open_tasks(step)
        pool = self._next_pool()
        self.drawn += 1
        if pool is None or not self._pools[pool]:
            task = self._walk_tasks()
            if task is not None:
                return task, self.epoch
            pool = "hard" if self._pools["hard"] else "easy"
        task = next(iter(self._pools[pool]))
        self._pools[pool][task] = self._pools[pool].pop(task)
        return task, self.epoch

    def observe(self, task: int, mean: float) -> None:
        """Update the pools with the mean reward of a group of this task."""
        pool = pool_of(mean, self.config)
        for name, tasks in self._pools.items():
            if name != pool:
                tasks.pop(task, None)
        if pool is not None:
            self._pools[pool].setdefault(task)

    def sizes(self) -> dict[str, int]:
        """Return the number of tasks in each pool and of open tasks in no pool."""
        easy, hard = len(self._pools["easy"]), len(self._pools["hard"])
        return {"easy": easy, "normal": self.window - easy - hard, "hard": hard}

    def state(self) -> CurriculumState:
        """Return the state for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "window": self.window,
            "drawn": self.drawn,
            "easy": list(self._pools["easy"]),
            "hard": list(self._pools["hard"]),
        }

    def restore(self, state: CurriculumState) -> None:
        """Continue from a checkpoint."""
        self.epoch, self.position, self.window = state["epoch"], state["position"], state["window"]
        self.drawn = state["drawn"]
        self._pools = {"easy": dict.fromkeys(state["easy"]), "hard": dict.fromkeys(state["hard"])}

    def _open_tasks(self, step: int) -> None:
        """Open the first `step / warmup_steps` of the tasks. A shuffled walk then restarts over all open tasks."""
        steps = self.config.warmup_steps
        window = self.size if step >= steps else max(1, -(-self.size * step // steps))
        if window <= self.window:
            return
        if self.config.shuffle and self.position:
            self.epoch, self.position = self.epoch + 1, 0
        self.window = window

    def _next_pool(self) -> Pool | None:
        """Return the pool of the next draw by the configured fractions. None: the walk."""
        shares: dict[Pool | None, Fraction] = {}
        if self.config.easy is not None:
            shares["easy"] = Fraction(str(self.config.easy.fraction))
        if self.config.hard is not None:
            shares["hard"] = Fraction(str(self.config.hard.fraction))
        shares[None] = 1 - sum(shares.values(), Fraction(0))
        having = [(name, share) for name, share in shares.items() if share > 0]
        turn, _ = share_out(self.drawn, [share for _, share in having])
        return having[turn][0]

    def _walk_tasks(self) -> int | None:
        """Return the next open task outside of the pools, or None if the next `_LOOKS` tasks are all in pools."""
        easy, hard = self._pools["easy"], self._pools["hard"]
        if len(easy) + len(hard) >= self.window:
            return None
        for _ in range(_LOOKS):
            if self.position >= self.window:
                self.epoch, self.position = self.epoch + 1, 0
            task = self.position
            if self.config.shuffle:
                task = permute_position(self.position, self.window, f"{self.key}/{self.epoch}")
            self.position += 1
            if task not in easy and task not in hard:
                return task
        return None
