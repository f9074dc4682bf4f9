"""Client of the channel to the trainer's rank 0, and the reason why the next step waits.

A reason names the responsible role, its activity and the start time. Its words are stable; numbers come last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from loguru import logger
from pydantic import BaseModel, ValidationError

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import Role
from rlrun.protocol.messages import trainer_channel
from rlrun.protocol.messages.trainer_channel import (
    BatchReady,
    Event,
    EventList,
    OrchestratorSaved,
    RankState,
    TrainerState,
)
from rlrun.runtime import exit_codes

SETTLED_SECONDS = 5.0
"""Seconds below which a difference between ranks is ignored, because they are about to reach the same phase."""
_RANKS_SHOWN = 4


@dataclass(frozen=True)
class Waiting:
    """Reason for waiting at one moment."""

    role: Role
    phase: str
    """Phase of that role with the step: `training, step 12`."""
    since: float
    """Start of the wait, in seconds since the epoch."""
    detail: str = ""
    """Additional facts."""

    def __str__(self) -> str:
        return f"{self.role}: {self.phase} since {clock_time(self.since)}" + (f"; {self.detail}" if self.detail else "")


def clock_time(seconds: float) -> str:
    """Format a time as `12:03:04Z`."""
    return time.strftime("%H:%M:%SZ", time.gmtime(seconds))


class Since:
    """Start time of the current wait. The renewal of the Lease updates it at least once per second."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._known: tuple[str, str] = ("", "")
        self._began = 0.0

    def waiting(self, role: Role, phase: str, detail: str = "") -> Waiting:
        """Return the current reason for waiting with its start time."""
        if self._known != (role, phase):
            self._known, self._began = (role, phase), self._now()
        return Waiting(role, phase, self._began, detail)


def of_trainer(state: TrainerState, step: int, now: float) -> Waiting:
    """Return the activity that the trainer reports while it works on `step`."""
    details = [f"micro-batch {state.part}"] if state.part else []
    if now - state.phase_since >= SETTLED_SECONDS:
        details += _ranks_apart(state.ranks, state)
    return Waiting("trainer", _phase_text(state.phase, step), state.phase_since, ", ".join(details))


def is_idle(state: TrainerState) -> bool:
    """Return whether the trainer has no work because other parts of the run produce the next batch."""
    return state.phase == "waiting_for_batch"


def _ranks_apart(ranks: Sequence[RankState], state: TrainerState) -> list[str]:
    """Describe the ranks in another phase than rank 0: they delay the group, or wait for it."""
    here = (_comparable_phase(state.phase), state.part)
    found = [rank for rank in ranks if (_comparable_phase(rank.phase), rank.part) != here]
    shown = [_rank_text(rank) for rank in found[:_RANKS_SHOWN]]
    return shown + ([f"{len(found) - len(shown)} more ranks"] if len(found) > len(shown) else [])


def _comparable_phase(phase: str) -> str:
    """Reduce a phase to the part that ranks share. Only rank 0 has the turn and the presence of a batch."""
    return "waiting" if phase.startswith("waiting_") else phase


def _rank_text(rank: RankState) -> str:
    part = f" micro-batch {rank.part}" if rank.part else ""
    return f"rank {rank.rank}: {_phase_text(rank.phase, rank.step)}{part} since {clock_time(rank.since)}"


def _phase_text(phase: str, step: int) -> str:
    return f"{phase.replace('_', ' ')}, step {step}"


POLL_SECONDS = 5.0
"""Duration of one long poll, which limits the age of the trainer's phase."""
STARTUP_SECONDS = 1800.0
"""Timeout of the trainer's first answer, which includes image pulls and loading of the model."""
SILENCE_SECONDS = 120.0
"""Timeout of a trainer that has answered before."""
SILENCE_AT_THE_END_SECONDS = 3.0
"""Timeout of a trainer that is expected to end. Its channel has a separate thread and answers during a save."""
REQUEST_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_START_PAUSE_SECONDS = 1.0
"""Longest pause between two requests to a starting trainer. A longer pause would delay each restart by as much."""
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, ConnectionError)

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class TrainerGoneError(Exception):
    """The trainer no longer answers, as expected after a stop."""


class TrainerClient:
    """Client of one attempt's trainer.

    Args:
        base_url: address of rank 0.
        api_key: key of the run.
        attempt: number of the attempt of trainer and orchestrator.
        lost: reader of the reason why a shared trainer no longer trains the run.
        verdict: reader of the reason why this attempt is over, reported outside of the channel; its result is None
            while the attempt runs.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        attempt: int,
        lost: Callable[[], Awaitable[RoleError]] | None = None,
        verdict: Callable[[], Awaitable[RoleError | None]] | None = None,
    ) -> None:
        self._base, self._attempt, self._lost, self._verdict = base_url.rstrip("/"), attempt, lost, verdict
        self._answered = time.monotonic()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self.state: TrainerState | None = None
        """Last state reported by the trainer."""
        self.ending = False
        """Set when the run stops. From then on a silent trainer counts as ended, and no request waits for it."""

    async def use_key(self, api_key: str) -> None:
        """Use another key for all later requests."""
        await self.close()
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def silence(self) -> float:
        """Probe the trainer's address and return the seconds since its last answer or the start. Any answer counts as
        0.
        """
        try:
            async with asyncio.timeout(SILENCE_AT_THE_END_SECONDS / 2 if self.ending else POLL_SECONDS):
                async with self._open_session().get(self._base + trainer_channel.STATE):
                    self._answered = time.monotonic()
                    return 0.0
        except _NO_ANSWER:
            return time.monotonic() - self._answered

    async def wait_until_ready(self, deadline_seconds: float = STARTUP_SECONDS) -> TrainerState:
        """Wait until this attempt's trainer has written its attempt file and loaded its model, and return its state.

        Raises:
            RoleError: the trainer does not start in time or refuses the key.
        """
        logger.info(f"waiting for the trainer at {self._base} (attempt {self._attempt})")
        deadline = time.monotonic() + deadline_seconds
        pause, reason = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                state = await self._send_request("GET", trainer_channel.STATE, TrainerState)
                # The trainer of an earlier attempt may still answer at this address while it ends.
                if state.attempt == self._attempt:
                    self.state = state
                    if state.phase not in ("starting", "loading"):
                        return state
                reason = f"it reports attempt {state.attempt}, phase {state.phase}"
                if state.attempt > self._attempt:
                    raise RoleError(
                        f"the trainer at {self._base} runs attempt {state.attempt}, so attempt {self._attempt} is over"
                    )
            except _NO_ANSWER as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise RoleError(
                    f"the trainer of attempt {self._attempt} did not answer at {self._base} within {deadline_seconds:g} s: {reason}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_START_PAUSE_SECONDS)

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events of this attempt in order, from the first. Never ends without an error.

        Raises:
            TrainerGoneError: the trainer has ended while `ending` is set.
            RoleError: the trainer is silent for too long, or another attempt answers.
        """
        seen = 0
        while True:
            answer = await self._request_with_retry(
                "GET", f"{trainer_channel.EVENTS}?after={seen}&wait={POLL_SECONDS:g}", EventList
            )
            if answer.attempt != self._attempt:
                raise RoleError(
                    f"the trainer at {self._base} runs attempt {answer.attempt}, this role {self._attempt}; all roles restart together"
                )
            self.state = await self._request_with_retry("GET", trainer_channel.STATE, TrainerState)
            for event in answer.events:
                seen = event.seq
                yield event

    async def batch_ready(self, step: int, path: str) -> None:
        """Announce a durable batch to the trainer."""
        await self._request_with_retry("POST", trainer_channel.BATCHES, _Anything, BatchReady(step=step, path=path))
        reach("batch.told")

    async def checkpoint_saved(self, step: int) -> None:
        """Report to the trainer that the orchestrator's part of a checkpoint is durable."""
        await self._request_with_retry("POST", trainer_channel.CHECKPOINTS, _Anything, OrchestratorSaved(step=step))
        reach("checkpoint.orchestrator.told")

    async def stop_and_wait(self, following: asyncio.Task[None], seconds: float) -> None:
        """Request a save and the end of the trainer, because the orchestrator stops, and wait for it.

        Args:
            following: task that reads the trainer's events and handles them.
            seconds: timeout.
        """
        # A trainer that has already ended never answers the request, so its silence ends the wait
        # as well.
        asking, leaving = asyncio.ensure_future(self._ask_to_stop()), asyncio.ensure_future(self._until_silent())
        try:
            await asyncio.wait([following, leaving], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)

    async def _ask_to_stop(self) -> None:
        with suppress(*_NO_ANSWER, TrainerGoneError):
            await self._send_request("POST", trainer_channel.STOP, _Anything)

    async def _until_silent(self) -> None:
        """Return when the address is silent. The address of a deleted pod refuses no connection, so a request waits for
        its timeout.
        """
        self._answered = time.monotonic()
        while True:
            if await self.silence() >= SILENCE_AT_THE_END_SECONDS:
                return
            await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def shutdown(self) -> None:
        """Request the end of the trainer after the last step. The trainer may end before it answers."""
        try:
            await self._send_request("POST", trainer_channel.SHUTDOWN, _Anything)
        except (*_NO_ANSWER, TrainerGoneError):
            return

    async def _request_with_retry(
        self, method: str, path: str, model: type[AnswerT], body: BaseModel | None = None
    ) -> AnswerT:
        """Send a request and repeat it while the trainer is silent. All requests are idempotent."""
        since, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._send_request(method, path, model, body)
            except _NO_ANSWER as error:
                if self.ending:
                    raise TrainerGoneError from error
                if self._verdict is not None and (over := await self._verdict()) is not None:
                    raise over from error
                if time.monotonic() - since > SILENCE_SECONDS:
                    reason = str(error) or type(error).__name__
                    raise RoleError(
                        f"the trainer at {self._base} has not answered for {SILENCE_SECONDS:g} s: {reason}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS + POLL_SECONDS)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self._session

    async def _send_request(
        self, method: str, path: str, model: type[AnswerT], body: BaseModel | None = None
    ) -> AnswerT:
        document = None if body is None else body.model_dump(mode="json")
        async with self._open_session().request(method, self._base + path, json=document) as response:
            text = await response.text()
            if response.status == 401 and self._lost is None:
                raise RoleError(
                    f"the trainer at {self._base} refuses the key; set the same RLRUN_API_KEY for all roles",
                    exit_codes.CONFIGURATION,
                )
            if (
                response.status in (trainer_channel.GONE, 401) and self._lost is not None
            ):  # 401: another run has replaced the host
                if self.ending:
                    raise TrainerGoneError
                raise await self._lost()
            if response.status >= 400:
                raise RoleError(f"the trainer at {self._base} refused {method} {path}: {text.strip()[:500]}")
            try:
                return model.model_validate_json(text)
            except ValidationError as error:
                raise RoleError(f"{self._base}{path} is not a trainer's channel: {text[:200]!r}") from error


class _Anything(BaseModel):
    """Answer with any content."""
