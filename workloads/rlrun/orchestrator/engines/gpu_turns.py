"""Turns of trainer and engines on the same GPUs. The orchestrator leads:

    engines   sample the rollouts of step n, and answer the evaluation of version n-1
    here      nothing is in flight -> every engine sleeps -> the batch of step n is announced
    trainer   takes its memory, trains, publishes version n, gives its memory up, says `released`
    here      version n is handed to the engines, which wake for it

Nothing of this is on the disk. Engines and trainer begin an attempt asleep and with their memory given up; a death in between ends
the attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.inference.client.engine_client import EngineError
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.pool import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

SLEEP_SECONDS = 300.0
"""Longest time until an engine has been put to sleep, tried again and again, before the attempt fails."""
_CANNOT = 400
"""Status with which an engine answers that was not started for it."""


class GPUTurns:
    """Ownership of the GPUs, in turns.

    Args:
        pool: the engines.
        sync: gives them weights when it is their turn.
        signal: notified after each change.
        timeout_seconds: deadline of one engine's sleep.
        quiet: whether nothing needs an engine that has begun: no rollout, no evaluation.
    """

    def __init__(
        self, pool: EnginePool, sync: WeightSync, signal: Signal, *, timeout_seconds: float, quiet: Callable[[], bool]
    ) -> None:
        self._pool, self._sync, self._signal, self._timeout, self._quiet = pool, sync, signal, timeout_seconds, quiet
        self._paths: dict[int, str | None] = {}
        self._released = -1
        self.seconds = 0.0
        """Seconds until all engines slept, the last time."""

    def published(self, version: int, path: str | None) -> None:
        """Note a published version while the trainer still has the GPUs."""
        self._paths[version] = path

    def released(self, version: int) -> str | None:
        """Let engines be woken, as the trainer has given its memory up. Returns the version's folder.

        Raises:
            RoleError: there is no such version.
        """
        if version not in self._paths:
            raise RoleError(f"the trainer released the GPUs for version {version}, which it has not published")
        self._released = version
        return self._paths.pop(version)

    async def to_trainer(self, step: int) -> None:
        """Return once no engine has anything of the GPUs, and none will before the trainer has released them after `step`.

        Raises:
            RoleError: an engine cannot be put to sleep.
        """
        await self._signal.until(lambda: self._released >= step - 1 and self._quiet())
        began = time.monotonic()
        self._sync.rest()  # in one step with the look before it: no request begins in between
        await self._signal.until(lambda: not any(replica.updating for replica in self._pool.replicas))
        async with asyncio.TaskGroup() as tasks:
            for replica in list(self._pool.replicas):
                tasks.create_task(self._put_to_sleep(replica))
        self.seconds = time.monotonic() - began
        reach("turn.engines_asleep")

    async def _put_to_sleep(self, replica: Replica) -> None:
        deadline, pause = time.monotonic() + SLEEP_SECONDS, FIRST_PAUSE_SECONDS
        while replica in self._pool.replicas:  # one that is gone has nothing of the GPUs
            try:
                async with asyncio.timeout(self._timeout):
                    await replica.client.sleep()
                    return
            except (EngineError, TimeoutError) as error:
                reason = str(error) or f"no answer within {self._timeout:g} s"
                if isinstance(error, EngineError) and error.status == _CANNOT:
                    raise RoleError(reason, exit_codes.CONFIGURATION) from None
            if time.monotonic() > deadline:
                raise RoleError(
                    f"engine {replica.url} could not be put to sleep within {SLEEP_SECONDS:g} s, so that the trainer cannot have "
                    f"its GPUs: {reason}"
                )
            logger.warning(f"engine {replica.url} does not sleep yet: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
