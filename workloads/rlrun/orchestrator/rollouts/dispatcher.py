"""Dispatch of waiting groups, and the limit of failed rollouts above which the run stops.

`ErrorBudget` is pure. `Dispatcher` checks the condition for a group's start, and plays the group's rollouts.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from loguru import logger

from rlrun.config.models.rollout import SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.stage import TaskRef
from rlrun.inference.client.engine_client import EngineUnavailableError
from rlrun.orchestrator.groups.groups import Flight, Groups, Outcome
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.rollouts.conversation import RolloutError
from rlrun.orchestrator.rollouts.engine_session import Opening, Session, derived_seed
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.playable_tasks import UnplayableTasks, unplayable_reason
from rlrun.orchestrator.rollouts.player import Player, compare_group
from rlrun.orchestrator.staleness import dispatch_capacity
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

WINDOW_ROLLOUTS = 100
DEATH_SHARE = 0.1
"""Upper bound of the share of the window for one ended environment process, at least one rollout. The end of a process
fails many rollouts but is one fault.
"""


class ErrorBudget:
    """Outcomes of the latest rollouts.

    Args:
        max_ratio: share of failed rollouts in the window above which the run fails; at 1.0, if all failed.
        batch_size: rollouts per step, the minimum of the window's size.
    """

    def __init__(self, max_ratio: float, batch_size: int) -> None:
        self._max_ratio = max_ratio
        self._size = max(WINDOW_ROLLOUTS, batch_size)
        self._window: deque[tuple[str, str | None]] = deque(maxlen=self._size)
        self._of_death: Counter[tuple[str, int]] = Counter()

    def record(self, environment: str, error: str | None = None, *, death: int = 0) -> str | None:
        """Count one rollout.

        Args:
            environment: name of its environment.
            error: error of the rollout, or None.
            death: number of the environment process's end that failed it; 0 for other causes.

        Returns:
            Message for the user if the limit is exceeded, otherwise None. The missing rollouts of an incomplete window
            count as successful.
        """
        if death:
            self._of_death[environment, death] += 1
            if self._of_death[environment, death] > max(1, int(DEATH_SHARE * self._size)):
                return None
        self._window.append((environment, error))
        if error is None:
            return None
        failed = [(name, text) for name, text in self._window if text is not None]
        if len(failed) <= self._max_ratio * self._size and len(failed) < self._size:
            return None
        worst, count = Counter(name for name, _ in failed).most_common(1)[0]
        first = next(text for name, text in failed if name == worst)
        return (
            f"{len(failed)} of the last {len(self._window)} rollouts ended in an error, {count} of them in environment {worst!r} "
            f"(orchestrator.maxErrorRatio is {self._max_ratio:g} of {self._size}). The first one: {first}"
        )


MAX_RETRIES = 2
"""Retries of a failed rollout. Then the group is dropped and another one replaces it."""

MAX_LOST = 16
"""Additional retries of a rollout whose process was ended by the code of another rollout."""


T = TypeVar("T")


class GroupGivenUpError(Exception):
    """A rollout failed more often than allowed."""


class GroupUnplayableError(Exception):
    """The task of a group is unplayable.

    Args:
        reason: name in metrics.
        message: error of the task.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Dispatcher:
    """Start of waiting groups within the limits of staleness and concurrency.

    Args:
        context: context of the attempt.
        groups: state of the groups.
        player: player of the episodes.
    """

    def __init__(self, context: RunContext, groups: Groups, player: Player) -> None:
        self._config, self._arenas, self._pool, self._chat = context.config, context.arenas, context.pool, context.chat
        self._signal, self._groups, self._player = context.signal, groups, player
        self._budget = ErrorBudget(self._config.max_error_ratio, self._config.batch_size)
        self._unplayable = UnplayableTasks({arena.config.label: len(arena.tasks) for arena in self._arenas})

    def room(self) -> int:
        """Return the number of rollouts that may be dispatched now."""
        version = self._pool.version
        if version is None or not self._pool.usable:
            return 0
        config, groups = self._config, self._groups
        running, accepted = groups.running, groups.accepted
        allowed = dispatch_capacity(
            concurrency=config.max_concurrency,
            running=running,
            max_async_level=config.algorithm.max_async_level,
            version=version,
            batch_size=config.batch_size,
            accepted=accepted,
            surplus=config.surplus if groups.feeds(version) else 0,
        )
        # Groups in flight whose first request is not sent yet will need room as well. Without them
        # one free place would start many groups.
        if self._pool.limited:
            coming = sum(flight.size for flight in groups.in_flight.values() if not flight.affinity.asked)
            allowed = min(allowed, self._pool.room() - coming)
        # Near the end only as many rollouts as the remaining steps need.
        return min(allowed, config.max_steps * config.batch_size + config.surplus - (accepted + running))

    def ahead(self) -> bool:
        """Return whether all rollouts that staleness allows have started, so that only the trainer can cause new ones."""
        version, config, groups = self._pool.version, self._config, self._groups
        if version is None:
            return False
        started = groups.accepted + groups.running
        allowed = dispatch_capacity(
            concurrency=config.max_concurrency + groups.running,
            running=groups.running,
            max_async_level=config.algorithm.max_async_level,
            version=version,
            batch_size=config.batch_size,
            accepted=groups.accepted,
        )
        return allowed <= 0 or started >= config.max_steps * config.batch_size

    async def run(self) -> None:
        """Dispatch until canceled.

        Raises:
            RoleError: too many rollouts failed.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._cancel_withdrawn())
            while True:
                await self._signal.until(lambda: self.room() > 0)
                version = self._pool.version
                assert version is not None
                flight = self._groups.take(version)
                flight.task = tasks.create_task(self._dispatch_group(flight))
                await asyncio.sleep(0)  # starting a thousand rollouts in one go would block the event loop

    async def _cancel_withdrawn(self) -> None:
        withdrawn = self._groups.withdrawn
        while True:
            await self._signal.until(lambda: bool(withdrawn))
            flight = withdrawn.popleft()
            if flight.task is not None:
                flight.task.cancel()
            await asyncio.sleep(0)  # ending a thousand rollouts in one go would block the event loop

    async def _dispatch_group(self, flight: Flight) -> None:
        outcome: Outcome = None
        try:
            outcome = await self._play_group(flight)
        except* EngineUnavailableError as errors:
            outcome = "engine"
            logger.warning(f"group {flight.number} is dispatched again: {errors.exceptions[0]}")
        except* GroupGivenUpError:
            outcome = "error"
        except* GroupUnplayableError as errors:
            outcome = "unplayable"
            self._refuse_task(flight, errors.exceptions[0])
        finally:
            # Also after a cancellation: a group that never ended stays in flight and counts against
            # the limit of rollouts.
            self._groups.end(flight, outcome)

    async def _play_group(self, flight: Flight) -> FinishedGroup:
        draw = self._groups.sampler.draw(flight.number)
        arena = self._arenas[draw.environment]
        if reason := self._unplayable.reason(arena.config.label, draw.task):
            raise GroupUnplayableError(reason, f"an earlier rollout of task {arena.tasks[draw.task]} was refused")
        # Members that were durable before an engine or an attempt ended are not played again.
        missing = [member for member in range(flight.size) if member not in flight.members]
        async with asyncio.TaskGroup() as tasks:
            # Each member has its own seed, so with seeds the first turns are separate requests.
            shared = arena.environment.single_turn and self._sampling_of(arena).seed is None
            opening = Opening(len(missing)) if shared else None
            for member in missing:
                tasks.create_task(self._play_member(flight, member, draw.task, arena, opening))
        rollouts = tuple(rollout for _, rollout in sorted(flight.members.items()))
        if arena.environment.compares:
            # Not in the journal: a restart reads the members there and compares them again.
            task = arena.tasks[draw.task]
            rollouts = await self._run_with_retries(arena, task, partial(compare_group, arena, task, rollouts))
        self._unplayable.record(arena.config.label, None)
        return FinishedGroup(
            number=flight.number,
            environment=arena.config.label,
            task_id=rollouts[0].task_id,
            dispatch_version=flight.version,
            temperature=self._sampling_of(arena).temperature,
            rollouts=rollouts,
        )

    def _sampling_of(self, arena: Arena) -> SamplingConfig:
        return arena.config.sampling or self._config.sampling

    async def _play_member(self, flight: Flight, member: int, task: int, arena: Arena, opening: Opening | None) -> None:
        """Play one member until its rollout is durable."""
        rollout = await self._play_rollout(arena, arena.tasks[task], opening, flight, member)
        await self._groups.keep(flight, member, rollout, temperature=self._sampling_of(arena).temperature)

    async def _play_rollout(
        self, arena: Arena, task: TaskRef, opening: Opening | None, flight: Flight, member: int
    ) -> Rollout:
        """Play one rollout until it succeeds."""
        sampling = self._sampling_of(arena)
        stops = self._chat.called_with(sampling.chat_template_arguments).stop_token_ids
        tries = 0

        async def play_once() -> Rollout:
            nonlocal opening, tries
            # Each try has another seed: with the same seed it would fail in the same way.
            seed = None if sampling.seed is None else derived_seed(sampling.seed, flight.number, member, tries)
            session = Session(
                self._pool,
                sampling,
                stops,
                opening=opening,
                affinity=flight.affinity,
                seed=seed,
                with_routes=self._config.replay_routes,
            )
            tries += 1
            # Only the first try takes part in the group's shared request; a retry gets a new
            # continuation.
            opening = None
            try:
                return await self._player.play(arena, task, sampling=sampling, session=session)
            except asyncio.CancelledError:
                flight.cut.append(session.tokens_so_far())
                raise
            except (EpisodeError, RolloutError) as error:
                if not (isinstance(error, EpisodeError) and error.bystander):
                    self._groups.ledger.remove("error", [session.tokens_so_far()])
                raise

        rollout = await self._run_with_retries(arena, task, play_once)
        self._groups.ledger.counters["rollouts"] += 1
        self._groups.ledger.counters["tokens"] += rollout.loss_tokens
        return rollout

    async def _run_with_retries(self, arena: Arena, task: TaskRef, play_once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `play_once`, with retries after errors of the environment.

        Raises:
            GroupGivenUpError: it failed too often.
            GroupUnplayableError: each try would fail.
            RoleError: too many rollouts failed.
        """
        failures, lost, label = 0, 0, arena.config.label
        while failures <= MAX_RETRIES:
            try:
                found = await play_once()
            except EpisodeError as error:
                if (reason := unplayable_reason(error)) is not None:
                    raise GroupUnplayableError(reason, str(error)) from error
                # The process was ended by another rollout. The retries have their own limit,
                # because one bad task would otherwise use up those of the other rollouts.
                if error.bystander and lost < MAX_LOST:
                    lost += 1
                    self._groups.ledger.counters[f"lost/{label}"] += 1
                else:
                    failures += 1
                    self._count_failure(label, error.kind, str(error), error.death)
                continue
            except RolloutError as error:
                message = f"environment {arena.environment.id!r}, task {task}: {error}"
                if (reason := unplayable_reason(error)) is not None:
                    raise GroupUnplayableError(reason, message) from error
                failures += 1
                self._count_failure(label, "tokens", message)
                continue
            self._budget.record(label)
            return found
        raise GroupGivenUpError

    def _refuse_task(self, flight: Flight, error: BaseException) -> None:
        """Count the unplayable task of a group once, even if several of its rollouts met the error.

        Raises:
            RoleError: too many tasks of the environment are unplayable.
        """
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, GroupUnplayableError)
        draw = self._groups.sampler.draw(flight.number)
        label, counters = self._arenas[draw.environment].config.label, self._groups.ledger.counters
        if self._unplayable.add(label, draw.task, error.reason):
            counters[f"unplayable/{label}/{error.reason}"] += 1
            found = sum(count for name, count in counters.items() if name.startswith(f"unplayable/{label}/"))
            if found == 1 or found % 50 == 0:
                logger.warning(
                    f"{found} tasks of environment {label!r} are unplayable and skipped; the latest: {error.message}"
                )
        if verdict := self._unplayable.record(label, error.reason, error.message):
            raise RoleError(verdict, exit_codes.DATA)

    def _count_failure(self, label: str, kind: str, message: str, death: int = 0) -> None:
        counters = self._groups.ledger.counters
        counters["errors"] += 1
        counters[f"errors/{label}/{kind}"] += 1
        if counters["errors"] == 1 or counters["errors"] % 50 == 0:
            logger.warning(f"{counters['errors']} rollouts ended in an error; the latest: {message}")
        verdict = self._budget.record(label, message, death=death)
        if verdict is not None:
            raise RoleError(verdict, exit_codes.DATA)
