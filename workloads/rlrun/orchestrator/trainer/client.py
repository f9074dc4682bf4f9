"""The orchestrator's side of the channel to the trainer's rank 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import aiohttp
from loguru import logger
from pydantic import BaseModel, ValidationError

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages import channel
from rlrun.protocol.messages.channel import BatchReady, Event, EventList, OrchestratorSaved, TrainerState
from rlrun.runtime import exit_codes

POLL_SECONDS = 5.0
"""Length of one long poll; the trainer's phase is at most this old."""
STARTUP_SECONDS = 1800.0
"""Longest wait for the trainer's first answer: images are pulled and models loaded."""
SILENCE_SECONDS = 120.0
"""Longest time that a trainer that answered before may be silent."""
SILENCE_AT_THE_END_SECONDS = 3.0
"""The same, of a trainer that is expected to end; its channel has a thread of its own, and answers while it saves."""
REQUEST_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_START_PAUSE_SECONDS = 1.0
"""Longest pause between two questions to a trainer that is still starting: a longer one would cost each restart as much."""
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, ConnectionError)

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class TrainerGoneError(Exception):
    """The trainer does not answer any more, which was to be expected."""


class TrainerClient:
    """Client of one attempt's trainer.

    Args:
        base_url: where rank 0 listens.
        api_key: the run's key.
        attempt: the attempt that trainer and orchestrator belong to.
        lost: says why the trainer does not train the run any more, where it may go on without the run.
        verdict: why this attempt is over, where that is reported beside the channel; None: it is not.
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
        """The trainer's last report of its state."""
        self.ending = False
        """Set when the run stops: from then on a trainer that does not answer has ended, and nobody waits for it."""

    async def use_key(self, api_key: str) -> None:
        """Ask with another key from now on."""
        await self.close()
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def silence(self) -> float:
        """Probe the trainer's address, whatever the answer; seconds since the last answer (or since the start), 0: now."""
        try:
            async with asyncio.timeout(SILENCE_AT_THE_END_SECONDS / 2 if self.ending else POLL_SECONDS):
                async with self._opened().get(self._base + channel.STATE):
                    self._answered = time.monotonic()
                    return 0.0
        except _NO_ANSWER:
            return time.monotonic() - self._answered

    async def wait_until_begun(self, deadline_seconds: float = STARTUP_SECONDS) -> TrainerState:
        """The state of this attempt's trainer, as soon as its attempt is on disk and its model is there.

        Raises:
            RoleError: it does not come up in time, or refuses the key.
        """
        logger.info(f"waiting for the trainer at {self._base} (attempt {self._attempt})")
        deadline = time.monotonic() + deadline_seconds
        pause, reason = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                state = await self._request("GET", channel.STATE, TrainerState)
                if state.attempt == self._attempt:
                    self.state = state
                    if state.phase not in ("starting", "loading"):
                        return state
                reason = f"attempt {state.attempt} is {state.phase} there"
                if state.attempt > self._attempt:
                    raise RoleError(f"{reason}: attempt {self._attempt} is over")
            except _NO_ANSWER as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise RoleError(
                    f"the trainer of attempt {self._attempt} did not answer at {self._base} within {deadline_seconds:g} s: {reason}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_START_PAUSE_SECONDS)

    async def events(self) -> AsyncIterator[Event]:
        """All events of this attempt in order, from its first; never ends by itself.

        Raises:
            TrainerGoneError: `ending`, and the trainer has ended.
            RoleError: the trainer is silent for too long, or another attempt answers.
        """
        seen = 0
        while True:
            answer = await self._patiently("GET", f"{channel.EVENTS}?after={seen}&wait={POLL_SECONDS:g}", EventList)
            if answer.attempt != self._attempt:
                raise RoleError(
                    f"the trainer at {self._base} is now attempt {answer.attempt}, this is {self._attempt}: all roles start again together"
                )
            self.state = await self._patiently("GET", channel.STATE, TrainerState)
            for event in answer.events:
                seen = event.seq
                yield event

    async def batch_ready(self, step: int, path: str) -> None:
        """Announce a durable batch to the trainer."""
        await self._patiently("POST", channel.BATCHES, None, BatchReady(step=step, path=path))
        reach("batch.told")

    async def checkpoint_saved(self, step: int) -> None:
        """Announce to the trainer that the orchestrator's part of a checkpoint is durable."""
        await self._patiently("POST", channel.CHECKPOINTS, None, OrchestratorSaved(step=step))
        reach("checkpoint.orchestrator.told")

    async def see_off(self, following: asyncio.Task[None], seconds: float) -> None:
        """Ask the trainer to save and end, because the orchestrator is to stop, and wait until it has.

        Args:
            following: reads the trainer's events, and does what they ask for.
            seconds: at most.
        """
        asking, leaving = asyncio.ensure_future(self._ask_to_stop()), asyncio.ensure_future(self._until_silent())
        try:
            await asyncio.wait([following, leaving], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)

    async def _ask_to_stop(self) -> None:
        with suppress(*_NO_ANSWER, TrainerGoneError):
            await self._request("POST", channel.STOP, None)

    async def _until_silent(self) -> None:
        """Return once the address is silent: a pod that is gone refuses no connection, and a request waits for its time-out."""
        self._answered = time.monotonic()
        while True:
            if await self.silence() >= SILENCE_AT_THE_END_SECONDS:
                return
            await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def shutdown(self) -> None:
        """Ask the trainer to end because all is done; it may be gone before it answers."""
        try:
            await self._request("POST", channel.SHUTDOWN, None)
        except (*_NO_ANSWER, TrainerGoneError):
            return

    async def _patiently(
        self, method: str, path: str, model: type[AnswerT] | None, body: BaseModel | None = None
    ) -> AnswerT:
        """One request, repeated while the trainer is silent: each of them may be sent twice without harm."""
        since, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._request(method, path, model, body)
            except _NO_ANSWER as error:
                if self.ending:
                    raise TrainerGoneError from error
                if self._verdict is not None and (over := await self._verdict()) is not None:
                    raise over from error
                if time.monotonic() - since > SILENCE_SECONDS:
                    reason = str(error) or type(error).__name__
                    raise RoleError(
                        f"the trainer at {self._base} has been silent for {SILENCE_SECONDS:g} s: {reason}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS + POLL_SECONDS)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self._session

    async def _request(
        self, method: str, path: str, model: type[AnswerT] | None, body: BaseModel | None = None
    ) -> AnswerT:
        document = None if body is None else body.model_dump(mode="json")
        async with self._opened().request(method, self._base + path, json=document) as response:
            text = await response.text()
            if response.status == 401 and self._lost is None:
                raise RoleError(
                    f"the trainer at {self._base} refuses the key: RLRUN_API_KEY must be the same for all roles",
                    exit_codes.CONFIGURATION,
                )
            if response.status in (channel.GONE, 401) and self._lost is not None:  # 401: another host of that name
                if self.ending:
                    raise TrainerGoneError
                raise await self._lost()
            if response.status >= 400:
                raise RoleError(f"the trainer at {self._base} refused {method} {path}: {text.strip()[:500]}")
            try:
                return (model or _Anything).model_validate_json(text)  # type: ignore[return-value]
            except ValidationError as error:
                raise RoleError(f"{self._base}{path} is not a trainer's channel: {text[:200]!r}") from error


class _Anything(BaseModel):
    """An answer whose content does not matter."""
