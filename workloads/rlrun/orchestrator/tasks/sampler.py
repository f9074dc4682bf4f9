"""Task of each group. Without a curriculum it is a pure function of the run's seed and the group's number.

Environments take turns by their ratios, as evenly as whole groups allow. Within an environment each epoch visits all tasks once, in an
order that is computed for one position at a time: the task list may be lazy and huge.

A curriculum (`curriculum`) also looks at rewards. So that the order does not depend on which message came first, tasks are
drawn in order of the groups' numbers, and a group that is meant for step n sees the rewards of the batches up to n-1-k, the last one
that must be made before the group may be dispatched: a restart that trains the same rollouts draws the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypedDict

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.staleness import newest_seen
from rlrun.orchestrator.tasks.curriculum import CurriculumState, TaskPools
from rlrun.orchestrator.tasks.permutation import permute_position, share_out
from rlrun.protocol.files.batch import Batch


@dataclass(frozen=True)
class Draw:
    """Choice for one group."""

    environment: int
    """Index of the environment."""
    task: int
    """Index of the task in its train split."""
    epoch: int
    """Number of times that the environment's tasks have all been visited before."""


@dataclass(frozen=True)
class Source:
    """One environment as the sampler sees it."""

    label: str
    size: int
    """Tasks in its train split."""
    ratio: float = 1.0
    """Share of groups, any positive number."""
    group_size: int = 1
    """Rollouts per group."""
    curriculum: CurriculumConfig | None = None


@dataclass(frozen=True)
class _Outcome:
    """A group that is closed, until the sampler may know of it."""

    step: int
    """Step of the batch that it is in, or that was made next."""
    group: int
    environment: int
    task: int
    mean: float


class SamplerState(TypedDict, total=False):
    """`Sampler` in a checkpoint; empty without a curriculum."""

    sources: list[list[object]]
    """Label and size of each environment, and whether it has a curriculum."""
    next: int
    rollouts: int
    open: list[list[int]]
    """Group, environment, task and epoch."""
    outcomes: list[tuple[int, int, int, int, float]]
    """Fields of `_Outcome`."""
    pools: dict[str, CurriculumState]
    """By the environment's label."""


@dataclass
class Sampler:
    """Tasks of all groups of a run.

    Args:
        seed: the run's seed.
        sources: the environments.
        batch_size: rollouts per step.
        max_async_level: k.
    """

    seed: int
    sources: Sequence[Source]
    batch_size: int = 1
    max_async_level: int = 0
    surplus: int = 0
    """Rollouts that are started beyond those of a step: the step that a group is meant for is at least that of as many rollouts before."""
    _next: int = 0
    """The lowest number that was never drawn; only counted where a source has a curriculum, like all that follows."""
    _rollouts: int = 0
    """Rollouts of all groups drawn, but for those that were dropped: they determine the step that a group is meant for."""
    _open: dict[int, Draw] = field(default_factory=dict)
    """Draws of groups that are not closed, and of those that a restart may still ask for."""
    _outcomes: list[_Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ratios = [Fraction(str(source.ratio)) for source in self.sources]
        self._pools = {
            index: TaskPools(source.curriculum, source.size, f"{self.seed}/{source.label}")
            for index, source in enumerate(self.sources)
            if source.curriculum is not None
        }

    @classmethod
    def from_config(cls, config: OrchestratorConfig, sizes: Sequence[int]) -> Sampler:
        """Sampler of a run; `sizes` are the numbers of tasks of its environments."""
        sources = [
            Source(own.label, size, own.ratio, own.group_size, own.curriculum)
            for own, size in zip(config.environments, sizes, strict=True)
        ]
        return cls(config.seed, sources, config.batch_size, config.algorithm.max_async_level, config.surplus)

    def draw(self, group: int) -> Draw:
        """Task of group `group` (from 0); the same at every call until the group is closed."""
        if not self._pools:
            environment, index = share_out(group, self._ratios)
            return self._shuffled(environment, index)
        self.draw_before(group + 1)
        if group not in self._open:
            self._assign(group)
        return self._open[group]

    def draw_before(self, group: int) -> None:
        """Draw for all groups below `group`, in order, as an earlier attempt did."""
        while self._pools and self._next < group:
            self._assign(self._next)
            self._next += 1

    def accept(self, step: int, means: Mapping[int, float]) -> None:
        """Take in groups that are in the batch of `step`, each with the mean reward of its rollouts."""
        for group, mean in means.items():
            self._close(step, group, mean)

    def drop(self, step: int, group: int, mean: float | None) -> None:
        """Take in a group given up before the batch of `step` is made; without a mean reward nothing is known of its task."""
        if draw := self._close(step, group, mean):
            self._rollouts -= self.sources[draw.environment].group_size

    def readmit(self, batch: Batch, means: Mapping[int, float]) -> None:
        """Take in an earlier attempt's batch, and what it gave up before; tasks are drawn again as they were then.

        Where that gives another task than the batch is of, its rewards do not count.
        """
        for one in batch.dropped:
            self.draw_before(one.next_group)
            self.drop(batch.step, one.group, one.mean_reward)
        played = dict(batch.tasks)
        for group, mean in means.items():
            self._close(batch.step, group, mean if self.draw(group).task == played.get(group) else None)

    def metrics(self) -> dict[str, float]:
        """Sizes of the pools: `pools/<environment>/easy`, `normal` and `hard`."""
        return {
            f"pools/{self.sources[index].label}/{name}": float(size)
            for index, pools in self._pools.items()
            for name, size in pools.sizes().items()
        }

    def state(self) -> SamplerState:
        """State for a checkpoint: JSON; empty without a curriculum."""
        if not self._pools:
            return {}
        return {
            "sources": self._signature(),
            "next": self._next,
            "rollouts": self._rollouts,
            "open": [[group, draw.environment, draw.task, draw.epoch] for group, draw in sorted(self._open.items())],
            "outcomes": [(o.step, o.group, o.environment, o.task, o.mean) for o in self._outcomes],
            "pools": {self.sources[index].label: pools.state() for index, pools in self._pools.items()},
        }

    def restore(self, state: SamplerState, *, step: int, next_group: int) -> bool:
        """Continue from a checkpoint.

        Args:
            state: of a sampler of the same environments.
            step: of the checkpoint.
            next_group: the lowest number that was never dispatched.

        Returns:
            False if the state is of other environments or of none, so that the pools start empty.
        """
        self._next, self._rollouts = next_group, step * self.batch_size
        if not self._pools or state.get("sources") != self._signature():
            return not self._pools or next_group == 0
        self._next, self._rollouts = state["next"], state["rollouts"]
        self._open = {group: Draw(environment, task, epoch) for group, environment, task, epoch in state["open"]}
        self._outcomes = [_Outcome(*outcome) for outcome in state["outcomes"]]
        for index, pools in self._pools.items():
            pools.restore(state["pools"][self.sources[index].label])
        return True

    def _signature(self) -> list[list[object]]:
        return [[source.label, source.size, source.curriculum is not None] for source in self.sources]

    def _shuffled(self, environment: int, index: int) -> Draw:
        source = self.sources[environment]
        epoch, position = divmod(index, source.size)
        return Draw(environment, permute_position(position, source.size, f"{self.seed}/{source.label}/{epoch}"), epoch)

    def _assign(self, group: int) -> None:
        environment, index = share_out(group, self._ratios)
        step = max(0, self._rollouts - self.surplus) // self.batch_size + 1
        self._learn(newest_seen(step, self.max_async_level))
        self._rollouts += self.sources[environment].group_size
        pools = self._pools.get(environment)
        self._open[group] = (
            self._shuffled(environment, index) if pools is None else Draw(environment, *pools.draw(step))
        )

    def _learn(self, step: int) -> None:
        """Take in the outcomes up to a batch, in an order that does not depend on which group ended first."""
        seen = sorted((o for o in self._outcomes if o.step <= step), key=lambda o: (o.step, o.group))
        if seen:
            self._outcomes = [o for o in self._outcomes if o.step > step]
        for outcome in seen:
            self._pools[outcome.environment].observe(outcome.task, outcome.mean)

    def _close(self, step: int, group: int, mean: float | None) -> Draw | None:
        draw = self._open.pop(group, None)
        if draw is not None and mean is not None and draw.environment in self._pools:
            self._outcomes.append(_Outcome(step, group, draw.environment, draw.task, mean))
        return draw
