"""Alternation of trainer and engines on the same GPUs, controlled by the orchestrator:

    engines        sample the rollouts of step n and answer the evaluation of version n-1
    orchestrator   no request is in flight -> all engines sleep -> it announces the batch of step n
    trainer        allocates its memory, trains, publishes version n, frees its memory, sends `released`
    orchestrator   hands version n to the engines, which wake up for it

No part of this state is on disk. At the start of an attempt the engines sleep and the trainer's memory is free; the death of a
process in between ends the attempt.
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
"""Timeout for putting an engine to sleep, retries included. Then the attempt fails."""
_CANNOT = 400
"""Status of an engine that was started without support for sleep."""


class GPUTurns:
    """Alternating ownership of the GPUs.

    Args:
        pool: pool of the engines.
        sync: weight hand-over, which wakes the engines.
        signal: signal notified after each change.
        timeout_seconds: timeout of one engine's sleep request.
        quiet: whether no running rollout or evaluation needs an engine.
    """

    def __init__(
        self, pool: EnginePool, sync: WeightSync, signal: Signal, *, timeout_seconds: float, quiet: Callable[[], bool]
    ) -> None:
        self._pool, self._sync, self._signal, self._timeout, self._quiet = pool, sync, signal, timeout_seconds, quiet
        self._paths: dict[int, str | None] = {}
        self._released = -1
        self.seconds = 0.0
        """Seconds of the latest wait until all engines slept."""

    def published(self, version: int, path: str | None) -> None:
        """Record a published version while the trainer still has the GPUs."""
        self._paths[version] = path

    def released(self, version: int) -> str | None:
        """Allow the engines to wake up after the trainer has freed its memory, and return the version's folder.

        Raises:
            RoleError: the version was not published.
        """
        if version not in self._paths:
            raise RoleError(f"the trainer released the GPUs for version {version}, which it has not published")
        self._released = version
        return self._paths.pop(version)

    async def to_trainer(self, step: int) -> None:
        """Return when all engines sleep. They stay asleep until the trainer releases the GPUs after `step`.

        Raises:
            RoleError: an engine cannot be put to sleep.
        """
        await self._signal.until(lambda: self._released >= step - 1 and self._quiet())
        began = time.monotonic()
        self._sync.rest()  # without an `await` after the check above, so that no request starts in between
        await self._signal.until(lambda: not any(replica.updating for replica in self._pool.replicas))
        async with asyncio.TaskGroup() as tasks:
            for replica in list(self._pool.replicas):
                tasks.create_task(self._put_to_sleep(replica))
        self.seconds = time.monotonic() - began
        reach("turn.engines_asleep")

    async def _put_to_sleep(self, replica: Replica) -> None:
        deadline, pause = time.monotonic() + SLEEP_SECONDS, FIRST_PAUSE_SECONDS
        while replica in self._pool.replicas:  # a removed engine uses no GPU
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
                    f"engine {replica.url} could not be put to sleep within {SLEEP_SECONDS:g} s, so the trainer cannot use "
                    f"its GPUs: {reason}"
                )
            logger.warning(f"engine {replica.url} does not sleep yet: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
