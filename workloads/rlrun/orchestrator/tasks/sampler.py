"""Task of each group. Without a curriculum it is a pure function of the run's seed and the group's number.

Environments take turns by their ratios, as evenly as complete groups allow. Within an environment each epoch visits all
tasks once, in an order computed for one position at a time, so that the task list may be lazy and huge.

A curriculum (`curriculum`) also depends on rewards. To be independent of the order of messages, tasks are drawn in
order of the groups' numbers, and a group of step n uses the rewards of the batches up to n-1-k. Batch n-1-k is the last
one that must exist before the group may be dispatched. A restart that trains the same rollouts therefore draws the same
tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypedDict

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.staleness import newest_seen
from rlrun.orchestrator.tasks.curriculum import CurriculumState, TaskPools, permute_position, share_out
from rlrun.protocol.files.batch import Batch


@dataclass(frozen=True)
class Draw:
    """Choice for one group."""

    environment: int
    """Index of the environment."""
    task: int
    """Index of the task in the environment's train split."""
    epoch: int
    """Number of complete passes over the environment's tasks before this draw."""


@dataclass(frozen=True)
class Source:
    """Sampling settings of one environment."""

    label: str
    size: int
    """Tasks in its train split."""
    ratio: float = 1.0
    """Relative share of the groups, a positive number."""
    group_size: int = 1
    """Rollouts per group."""
    curriculum: CurriculumConfig | None = None


@dataclass(frozen=True)
class _Outcome:
    """Result of a closed group, stored until the sampler may use it."""

    step: int
    """Step of the batch that contains the group, or of the next batch after its drop."""
    group: int
    environment: int
    task: int
    mean: float


class SamplerState(TypedDict, total=False):
    """State of `Sampler` in a checkpoint; empty without a curriculum."""

    sources: list[list[object]]
    """Label, size and presence of a curriculum of each environment."""
    next: int
    rollouts: int
    open: list[list[int]]
    """Group, environment, task and epoch."""
    outcomes: list[tuple[int, int, int, int, float]]
    """Fields of `_Outcome`."""
    pools: dict[str, CurriculumState]
    """Pools by the environment's label."""


@dataclass
class Sampler:
    """Tasks of all groups of a run.

    Args:
        seed: seed of the run.
        sources: environments.
        batch_size: rollouts per step.
        max_async_level: k.
    """

    seed: int
    sources: Sequence[Source]
    batch_size: int = 1
    max_async_level: int = 0
    surplus: int = 0
    """Rollouts started beyond those of a step. The step of a group is computed without this number of earlier rollouts.
    """
    _next: int = 0
    """Lowest number that was never drawn. This and the following fields are used only with a curriculum."""
    _rollouts: int = 0
    """Rollouts of all drawn groups without the dropped ones; they determine the step of a group."""
    _open: dict[int, Draw] = field(default_factory=dict)
    """Draws of open groups, and of groups that a restart may still need."""
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
        """Create the sampler of a run.

        Args:
            config: configuration of the role.
            sizes: number of tasks of each environment, in the order of the configuration.
        """
        sources = [
            Source(own.label, size, own.ratio, own.group_size, own.curriculum)
            for own, size in zip(config.environments, sizes, strict=True)
        ]
        return cls(config.seed, sources, config.batch_size, config.algorithm.max_async_level, config.surplus)

    def draw(self, group: int) -> Draw:
        """Return the task of group `group` (from 0), the same at every call until the group is closed."""
        if not self._pools:
            environment, index = share_out(group, self._ratios)
            return self._shuffled_draw(environment, index)
        self.draw_before(group + 1)
        if group not in self._open:
            self._assign_task(group)
        return self._open[group]

    def draw_before(self, group: int) -> None:
        """Draw for all groups below `group`, in order, like an earlier attempt did."""
        while self._pools and self._next < group:
            self._assign_task(self._next)
            self._next += 1

    def accept(self, step: int, means: Mapping[int, float]) -> None:
        """Record the groups of the batch of `step`, each with the mean reward of its rollouts."""
        for group, mean in means.items():
            self._close_group(step, group, mean)

    def drop(self, step: int, group: int, mean: float | None) -> None:
        """Record a group dropped before the batch of `step`. A mean reward of None has no effect on the curriculum."""
        if draw := self._close_group(step, group, mean):
            # Another group replaces a dropped one, so a dropped group does not advance the step of
            # later groups.
            self._rollouts -= self.sources[draw.environment].group_size

    def readmit(self, batch: Batch, means: Mapping[int, float]) -> None:
        """Record an earlier attempt's batch and its earlier drops; tasks are drawn again in the same way.

        If the drawn task differs from the batch's task, the rewards of the group have no effect.
        """
        for one in batch.dropped:
            # The drop happened after these draws, and it changes the step of the groups that
            # follow.
            self.draw_before(one.next_group)
            self.drop(batch.step, one.group, one.mean_reward)
        played = dict(batch.tasks)
        for group, mean in means.items():
            self._close_group(batch.step, group, mean if self.draw(group).task == played.get(group) else None)

    def metrics(self) -> dict[str, float]:
        """Return the sizes of the pools: `pools/<environment>/easy`, `normal` and `hard`."""
        return {
            f"pools/{self.sources[index].label}/{name}": float(size)
            for index, pools in self._pools.items()
            for name, size in pools.sizes().items()
        }

    def state(self) -> SamplerState:
        """Return the state for a checkpoint as JSON; empty without a curriculum."""
        if not self._pools:
            return {}
        return {
            "sources": self._source_signature(),
            "next": self._next,
            "rollouts": self._rollouts,
            "open": [[group, draw.environment, draw.task, draw.epoch] for group, draw in sorted(self._open.items())],
            "outcomes": [(o.step, o.group, o.environment, o.task, o.mean) for o in self._outcomes],
            "pools": {self.sources[index].label: pools.state() for index, pools in self._pools.items()},
        }

    def restore(self, state: SamplerState, *, step: int, next_group: int) -> bool:
        """Continue from a checkpoint.

        Args:
            state: state of a sampler of the same environments.
            step: step of the checkpoint.
            next_group: lowest number that was never dispatched.

        Returns:
            Whether the pools are restored; False if the state is empty or belongs to other environments, so that the
            pools start empty.
        """
        # Without a usable state the sampler continues as if all groups below had been drawn and
        # trained.
        self._next, self._rollouts = next_group, step * self.batch_size
        if not self._pools or state.get("sources") != self._source_signature():
            return not self._pools or next_group == 0
        self._next, self._rollouts = state["next"], state["rollouts"]
        self._open = {group: Draw(environment, task, epoch) for group, environment, task, epoch in state["open"]}
        self._outcomes = [_Outcome(*outcome) for outcome in state["outcomes"]]
        for index, pools in self._pools.items():
            pools.restore(state["pools"][self.sources[index].label])
        return True

    def _source_signature(self) -> list[list[object]]:
        return [[source.label, source.size, source.curriculum is not None] for source in self.sources]

    def _shuffled_draw(self, environment: int, index: int) -> Draw:
        source = self.sources[environment]
        epoch, position = divmod(index, source.size)
        return Draw(environment, permute_position(position, source.size, f"{self.seed}/{source.label}/{epoch}"), epoch)

    def _assign_task(self, group: int) -> None:
        environment, index = share_out(group, self._ratios)
        step = max(0, self._rollouts - self.surplus) // self.batch_size + 1
        # Only outcomes that every schedule has seen before this draw. Otherwise the drawn task
        # would depend on which rollout was faster, and a restart would draw another one.
        self._apply_outcomes(newest_seen(step, self.max_async_level))
        self._rollouts += self.sources[environment].group_size
        pools = self._pools.get(environment)
        self._open[group] = (
            self._shuffled_draw(environment, index) if pools is None else Draw(environment, *pools.draw(step))
        )

    def _apply_outcomes(self, step: int) -> None:
        """Apply the outcomes up to a batch, in an order that is independent of which group ended first."""
        seen = sorted((o for o in self._outcomes if o.step <= step), key=lambda o: (o.step, o.group))
        if seen:
            self._outcomes = [o for o in self._outcomes if o.step > step]
        for outcome in seen:
            self._pools[outcome.environment].observe(outcome.task, outcome.mean)

    def _close_group(self, step: int, group: int, mean: float | None) -> Draw | None:
        draw = self._open.pop(group, None)
        if draw is not None and mean is not None and draw.environment in self._pools:
            self._outcomes.append(_Outcome(step, group, draw.environment, draw.task, mean))
        return draw
