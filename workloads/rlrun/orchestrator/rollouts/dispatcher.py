"""Groups in flight: when one may start, how its rollouts are played, and what becomes of a group that fails or grows old."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.config.rollout import SamplingConfig
from rlrun.environments.episode import EpisodeError
from rlrun.environments.stage import TaskRef
from rlrun.inference.client import EngineUnavailableError
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.batches.filters import Rules, reason_to_drop
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.journal.format import DroppedEntry, RolloutEntry
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import Readmitted, Unfinished
from rlrun.orchestrator.journal.writer import Journal
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import RolloutError
from rlrun.orchestrator.rollouts.engine_session import Affinity, Opening, Session
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.error_budget import ErrorBudget
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.staleness import capacity, is_fed, too_old
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol import exit_codes
from rlrun.protocol.batch import Dropped
from rlrun.protocol.failures import RoleError

MAX_RETRIES = 2
"""Rollouts of a group that failed are played again this often; then the group is dropped and another takes its place."""

MAX_LOST = 16
"""A rollout that ended with its process while the code of another was running is played again this often beside that."""

MAX_FILTERED_BATCHES = 64
"""The run fails when as many rollouts as so many batches hold are filtered in a row."""


class GroupGivenUpError(Exception):
    """A rollout failed more often than it may."""


@dataclass
class _Flight:
    """A group in flight."""

    number: int
    version: int
    size: int
    since: float
    affinity: Affinity = field(default_factory=Affinity)
    members: dict[int, Rollout] = field(default_factory=dict)
    """Those that are finished, and durable."""
    task: asyncio.Task[None] | None = None
    expired: bool = False
    surplus: bool = False


class Dispatcher:
    """Starts groups as soon as staleness and concurrency allow.

    Args:
        config: the role's configuration.
        arenas: the environments, in the order of the sampler.
        player: plays episodes.
        pool: the engines.
        chat: for the tokens that end a reply.
        sampler: what a group plays.
        ledger: where groups are.
        rules: what is trained on, by the environment's label.
        accepted: rollouts that are in batches or in the buffer, see `staleness.capacity`.
        finished: gets each finished group.
        next_step: the step whose batch is made next.
        signal: notified after each change.
        journal: makes finished rollouts durable before they count; None where no restart could use them.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        arenas: Sequence[Arena],
        player: Player,
        pool: EnginePool,
        chat: ChatTokens,
        *,
        sampler: Sampler,
        ledger: Ledger,
        rules: Mapping[str, Rules],
        accepted: Callable[[], int],
        finished: Callable[[FinishedGroup], None],
        next_step: Callable[[], int],
        signal: Signal,
        journal: Journal | None,
    ) -> None:
        self._config, self._arenas, self._player = config, arenas, player
        self._pool, self._chat, self._sampler, self._ledger = pool, chat, sampler, ledger
        self._accepted, self._finished, self._signal = accepted, finished, signal
        self._budget = ErrorBudget(config.max_error_ratio, config.batch_size)
        self._flights: dict[int, _Flight] = {}
        self._rules, self._next_step = rules, next_step
        self._filtered: Counter[str] = Counter()
        """Rollouts that were filtered since the last group that was not, by reason."""
        self._dropped: list[Dropped] = []
        self._aged: set[int] = set()
        """Groups that were cancelled for their age and are not finished since."""
        self._journal = journal
        self._withdrawn: deque[_Flight] = deque()
        """Those that count as expired or surplus already, and are cancelled one after the other."""
        self._unfinished: dict[int, Unfinished] = {}
        """Groups to be dispatched again of which some members are finished already."""

    @property
    def running(self) -> int:
        """Rollouts in flight."""
        return sum(flight.size for flight in self._flights.values())

    def oldest(self) -> str | None:
        """The group that is in flight longest, in words; None: there is none."""
        flight = min(self._flights.values(), key=lambda flight: flight.since, default=None)
        if flight is None:
            return None
        draw = self._sampler.draw(flight.number)
        label, seconds = self._arenas[draw.environment].config.label, time.monotonic() - flight.since
        done = f", {len(flight.members)} of {flight.size} done" if flight.size > 1 else ""
        return f"{label}, task {draw.task}{done}, {seconds:.0f} s"

    def room(self) -> int:
        """Rollouts that may be dispatched now."""
        version = self._pool.version
        if version is None or not self._pool.candidates():
            return 0
        config = self._config
        running, accepted = self.running, self._accepted()
        allowed = capacity(
            concurrency=config.max_concurrency,
            running=running,
            max_async_level=config.algorithm.max_async_level,
            version=version,
            batch_size=config.batch_size,
            accepted=accepted,
            surplus=config.surplus if self._feeds(version) else 0,
        )
        if self._pool.limited:
            coming = sum(flight.size for flight in self._flights.values() if not flight.affinity.asked)
            allowed = min(allowed, self._pool.room() - coming)
        return min(allowed, config.max_steps * config.batch_size + config.surplus - (accepted + running))

    def _feeds(self, version: int) -> bool:
        return is_fed(self._next_step(), version=version, max_async_level=self._config.algorithm.max_async_level)

    async def run(self) -> None:
        """Dispatch until cancelled.

        Raises:
            RoleError: errors dominate.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._cancel_withdrawn())
            while True:
                await self._signal.until(lambda: self.room() > 0)
                version = self._pool.version
                assert version is not None
                number = self._ledger.take()
                arena = self._arenas[self._sampler.draw(number).environment]
                flight = _Flight(number, version, arena.config.group_size, time.monotonic())
                self._go_on(flight)
                self._flights[number] = flight
                flight.task = tasks.create_task(self._fly(flight))
                await asyncio.sleep(0)  # a thousand rollouts that begin at once would keep all others waiting

    def readmit(self, found: Readmitted) -> None:
        """Groups that an earlier attempt has begun: only the members that are missing are played."""
        self._unfinished |= found.unfinished

    def _go_on(self, flight: _Flight) -> None:
        """Take over the members of a group that are finished, unless they have grown too old."""
        before = self._unfinished.pop(flight.number, None)
        if before is None:
            return
        limit = self._config.algorithm.max_off_policy_steps
        if too_old(before.version, step=self._next_step(), max_off_policy_steps=limit):
            self._ledger.counters["discarded/age"] += len(before.members)
        else:
            flight.version, flight.members = before.version, dict(before.members)

    def take_dropped(self) -> tuple[Dropped, ...]:
        """The groups that were given up since the last call."""
        found, self._dropped = tuple(self._dropped), []
        return found

    def cancel_too_old(self, step: int) -> None:
        """Cancel groups in flight that no batch from `step` on may hold; their tasks are dispatched again."""
        limit = self._config.algorithm.max_off_policy_steps
        for flight in self._flights.values():
            if not (flight.expired or flight.surplus) and too_old(
                flight.version, step=step, max_off_policy_steps=limit
            ):
                flight.expired = True
                self._withdraw(flight)

    def cancel_surplus(self) -> None:
        """Cancel the groups that were started for a batch that is made without them, where more are started than a step needs.

        Groups that were passed over for their age stay: they must not starve.
        """
        for flight in self._flights.values() if self._config.surplus else ():
            if flight.number not in self._aged and not (
                flight.surplus or flight.expired or self._feeds(flight.version)
            ):
                flight.surplus = True
                self._withdraw(flight)

    def _withdraw(self, flight: _Flight) -> None:
        self._withdrawn.append(flight)
        self._signal.notify()

    async def _cancel_withdrawn(self) -> None:
        while True:
            await self._signal.until(lambda: bool(self._withdrawn))
            flight = self._withdrawn.popleft()
            if flight.task is not None:
                flight.task.cancel()
            await asyncio.sleep(0)  # the end of a thousand rollouts at once would keep all others waiting

    def waits_for(self, step: int) -> bool:
        """Whether the batch of `step` has to wait: a group in flight that was cancelled for its age before would be again.

        So what takes long is passed over once and then trained; it cannot starve.
        """
        limit = self._config.algorithm.max_off_policy_steps
        return any(
            number in self._flights
            and too_old(self._flights[number].version, step=step + 1, max_off_policy_steps=limit)
            for number in self._aged
        )

    async def _fly(self, flight: _Flight) -> None:
        number = flight.number
        outcome: FinishedGroup | Literal["engine", "error"] | None = None
        try:
            outcome = await self._play_group(flight)
        except* EngineUnavailableError as errors:
            outcome = "engine"
            logger.warning(f"group {number} is dispatched again: {errors.exceptions[0]}")
        except* GroupGivenUpError:
            outcome = "error"
        finally:
            # In one step without an await, so that a group is never in flight and elsewhere, nor nowhere.
            del self._flights[number]
            if flight.expired:
                self._aged.add(number)
                self._ledger.again(number, "age")
            elif flight.surplus and (outcome is None or isinstance(outcome, str)):
                self._give_up(DroppedEntry(number, "surplus", None, self._ledger.next_group, flight.version))
            elif outcome == "engine":
                self._ledger.again(number, "engine")
                if flight.members:
                    self._unfinished[number] = Unfinished(flight.version, flight.members)
            elif outcome == "error":
                self._aged.discard(number)
                self._give_up(DroppedEntry(number, "error", None, self._ledger.next_group, flight.version))
            elif outcome is not None:
                self._aged.discard(number)
                self.settle(outcome)
            self._signal.notify()

    def settle(self, group: FinishedGroup) -> None:
        """A dispatched group is finished: it is trained on, or filtered."""
        if reason := reason_to_drop(group, self._rules[group.environment]):
            newest = max(int(s.versions.max()) for rollout in group.rollouts for s in rollout.sequences)
            self._give_up(DroppedEntry(group.number, reason, group.mean_reward, self._ledger.next_group, newest))
            self._filtered[reason] += len(group.rollouts)
            if self._filtered.total() >= MAX_FILTERED_BATCHES * self._config.batch_size:
                found = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._filtered.items()))
                raise RoleError(
                    f"the last {self._filtered.total()} rollouts were all filtered ({found}), so no batch can be made; loosen "
                    "algorithm.filters or the curriculum, raise groupSize, or choose other tasks",
                    exit_codes.DATA,
                )
        else:
            self._filtered.clear()
            self._finished(group)

    def _give_up(self, entry: DroppedEntry) -> None:
        if self._journal is not None:
            self._journal.note(entry)
        self.drop(entry)

    def drop(self, entry: DroppedEntry) -> None:
        """A dispatched group is given up."""
        self._ledger.drop(entry.group, entry.reason)
        self._dropped.append(Dropped(entry.group, entry.reason, entry.mean_reward, entry.next_group))
        self._sampler.drop(self._next_step(), entry.group, entry.mean_reward)

    async def _play_group(self, flight: _Flight) -> FinishedGroup:
        draw = self._sampler.draw(flight.number)
        arena = self._arenas[draw.environment]
        missing = [member for member in range(flight.size) if member not in flight.members]
        async with asyncio.TaskGroup() as tasks:
            opening = Opening(len(missing)) if arena.environment.single_turn else None
            for member in missing:
                tasks.create_task(self._play_member(flight, member, draw.task, arena, opening))
        rollouts = tuple(rollout for _, rollout in sorted(flight.members.items()))
        return FinishedGroup(
            number=flight.number,
            environment=arena.config.label,
            task_id=rollouts[0].task_id,
            dispatch_version=flight.version,
            temperature=self._sampling(arena).temperature,
            rollouts=rollouts,
        )

    def _sampling(self, arena: Arena) -> SamplingConfig:
        return arena.config.sampling or self._config.sampling

    async def _play_member(
        self, flight: _Flight, member: int, task: int, arena: Arena, opening: Opening | None
    ) -> None:
        """Play one member until it is durable."""
        rollout = await self._rollout(arena, arena.tasks[task], opening, flight.affinity)
        if self._journal is not None:
            temperature = self._sampling(arena).temperature
            await self._journal.add(
                RolloutEntry(flight.number, member, arena.config.label, task, flight.version, temperature, rollout)
            )
        flight.members[member] = rollout

    async def _rollout(self, arena: Arena, task: TaskRef, opening: Opening | None, affinity: Affinity) -> Rollout:
        sampling = self._sampling(arena)
        failures = lost = 0
        while failures <= MAX_RETRIES:
            session = Session(self._pool, sampling, self._chat.stop_token_ids, opening=opening, affinity=affinity)
            opening = None
            try:
                rollout = await self._player.play(arena, task, max_tokens=sampling.max_tokens, session=session)
            except EpisodeError as error:
                if error.bystander and lost < MAX_LOST:
                    lost += 1
                    self._ledger.counters[f"lost/{arena.config.label}"] += 1
                else:
                    failures += 1
                    self._failed(arena.config.label, error.kind, str(error), error.death)
                continue
            except RolloutError as error:
                failures += 1
                message = f"environment {arena.environment.id!r}, task {task}: {error}"
                self._failed(arena.config.label, "tokens", message)
                continue
            self._budget.record(arena.config.label)
            self._ledger.counters["rollouts"] += 1
            self._ledger.counters["tokens"] += rollout.loss_tokens
            return rollout
        raise GroupGivenUpError

    def _failed(self, label: str, kind: str, message: str, death: int = 0) -> None:
        counters = self._ledger.counters
        counters["errors"] += 1
        counters[f"errors/{label}/{kind}"] += 1
        if counters["errors"] == 1 or counters["errors"] % 50 == 0:
            logger.warning(f"{counters['errors']} rollouts ended in an error; the latest: {message}")
        verdict = self._budget.record(label, message, death=death)
        if verdict is not None:
            raise RoleError(verdict, exit_codes.DATA)
