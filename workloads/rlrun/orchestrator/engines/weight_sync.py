"""Hand-over of published weights to the engines, and turns of engines and trainer on shared GPUs.

All replicas are updated in parallel, each with a timeout, to the newest version. During an evaluation the hand-over is held back, so that
one version answers the complete evaluation. A failed replica is out of rotation and is retried with a growing pause. The run continues as
long as one replica remains.

If trainer and engines use the same GPUs, the orchestrator controls their turns:

    engines        sample the rollouts of step n and answer the evaluation of version n-1
    orchestrator   no request is in flight -> all engines sleep -> it announces the batch of step n
    trainer        allocates its memory, trains, publishes version n, frees its memory, sends `released`
    orchestrator   hands version n to the engines, which wake up for it

No part of this state is on disk. At the start of an attempt the engines sleep and the trainer's memory is free; the death of a process in
between ends the attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.inference.client.engine_client import EngineError, EngineUnavailableError
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import OWN, REFUSED, explain_mismatch, of_status
from rlrun.runtime import exit_codes

KNOCK_SECONDS = 5.0
"""Timeout of the status request that precedes a hand-over to a replica out of rotation."""
OUTAGE_SECONDS = 600.0
"""Longest time without a usable engine before the attempt fails; a restart may repair it."""
STARTUP_SECONDS = 1800.0
"""Longest time without a usable engine before the first hand-over, while engines load and compile."""
FOREIGN_SECONDS = 60.0
"""Longest time with only engines of incompatible releases. During an upgrade, old engines may answer a little longer.
"""
_CHECK_SECONDS = 1.0
_NEVER = (400, 404)
"""Statuses of a replica that can never load the version: the folder has another model, or the trainer no longer has the
version.
"""


class WeightSync:
    """Hand-over of weights to the engines; no other part sends weights.

    Args:
        pool: pool of the engines.
        signal: signal notified after each change.
        timeout_seconds: timeout of one replica's update.
        sender: address of the trainer that sends versions from its memory. None: versions are folders.
    """

    def __init__(self, pool: EnginePool, signal: Signal, *, timeout_seconds: float, sender: str | None = None) -> None:
        self._pool, self._signal, self._timeout, self._sender = pool, signal, timeout_seconds, sender
        self._paths: dict[int, str | None] = {}
        self._held: deque[int] = deque()
        self._ever_synced = False
        self._foreign_since: float | None = None
        self.resting = False
        """Whether the hand-over is paused because the trainer has the GPUs."""
        self.newest: int | None = None
        """Newest version that the trainer has published."""
        self.seconds = 0.0
        """Seconds of the latest hand-over."""

    def publish(self, version: int, path: str | None, *, hold: bool) -> None:
        """Accept a version that the trainer has published.

        Args:
            version: number of the policy version.
            path: folder of the version. None: the model with which the engines were started.
            hold: whether all replicas get this version and no newer one until `release`.
        """
        self._paths[version] = path
        # With shared GPUs a version is passed on only after the trainer has freed them
        # (`released`), so it ends the rest.
        self.newest, self.resting = version, False
        if hold:
            self._held.append(version)
        self._wake_replicas()

    def rest(self) -> None:
        """Pause the engines: no requests, and no weights before the next published version."""
        self.resting = True
        self._pool.rest("it sleeps: the trainer has its GPUs")

    def release(self, version: int) -> None:
        """End the hold of a version."""
        if version in self._held:
            self._held.remove(version)
            self._wake_replicas()

    def held(self, version: int) -> bool:
        """Return whether the version is held."""
        return version in self._held

    def wanted(self, replica: Replica) -> int | None:
        """Return the version that a replica must load now, or None if it is up to date. Versions in between are
        skipped.
        """
        if self.resting:
            return None
        # The oldest held version comes first, because its evaluation has waited longest. A newer
        # one would end it without a result.
        target = self._held[0] if self._held else self.newest
        return None if target == replica.version else target

    async def run(self) -> None:
        """Keep all replicas up to date, including replicas added later.

        Raises:
            RoleError: no replica was usable for too long.
        """
        keeping: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_outage())
            while True:
                members = set(self._pool.replicas)
                for gone in keeping.keys() - members:
                    keeping.pop(gone).cancel()
                # A task for each replica: a slow or hanging engine does not delay the hand-over to
                # the others.
                for new in members - keeping.keys():
                    keeping[new] = tasks.create_task(self._keep_up(new))
                await self._pool.members.until(lambda: set(self._pool.replicas) != keeping.keys())

    def _wake_replicas(self) -> None:
        for replica in self._pool.replicas:
            replica.needs_weights.notify()
        self._signal.notify()

    async def _keep_up(self, replica: Replica) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await replica.needs_weights.until(lambda: self.wanted(replica) is not None)
            if replica.version is None and (rest := replica.rest_until - time.monotonic()) > 0:
                await asyncio.sleep(rest)
                continue
            version = self.wanted(replica)
            assert version is not None
            if await self._hand_over(replica, version):
                pause = FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _hand_over(self, replica: Replica, version: int) -> bool:
        began = time.monotonic()
        replica.updating = True
        try:
            if replica.version is None:
                # A replica out of rotation may hang or still be starting. A cheap request finds
                # that out before the long timeout of a hand-over.
                await _check_answers(replica)
            # Before the request: the engine may load the version and sample with it even if its answer is lost.
            replica.handed = max(replica.handed, version)
            reach("handover.before_request")
            async with asyncio.timeout(self._timeout):
                # Forced the first time in an attempt: the engine may hold weights of another attempt under the same number.
                path = self._paths[version]
                if self._sender is not None:
                    await replica.client.receive_weights(self._sender, version, force=not replica.trusted)
                elif path is None:
                    await replica.client.reload_weights(version, force=not replica.trusted)
                else:
                    await replica.client.update_weights(path, version, force=not replica.trusted)
        except (EngineError, TimeoutError) as error:
            status = error.status if isinstance(error, EngineError) else None
            replica.foreign = status == REFUSED
            reason = str(error) or f"no answer to the hand-over of version {version} in time"
            if isinstance(error, TimeoutError | EngineUnavailableError):
                self._pool.abandon(replica, reason)  # it hangs or is paused, so its requests would never be answered
            else:
                self._pool.fail(replica, reason)
            if status in _NEVER and version in self._held:
                logger.warning(f"version {version} cannot be loaded for its evaluation: {reason}")
                self.release(version)
            return False
        finally:
            replica.updating = False
            self._signal.notify()
        # From here on an outage is a fault that a restart can repair, and not an engine that takes
        # long to start.
        self._ever_synced = True
        if replica.version is None:
            logger.info(f"engine {replica.url} is in rotation with version {version}")
            replica.rotation += 1
        took = time.monotonic() - began
        replica.trusted, replica.suspect, replica.foreign = True, False, False
        # Other replicas get as much time as this one needed before it alone gets the new rollouts
        # (`EnginePool.version`). The dispatcher is woken then, because no other event may happen.
        replica.version, replica.due = version, time.monotonic() + took
        asyncio.get_running_loop().call_later(took, self._signal.notify)
        self.seconds = took
        oldest = min((r.version or 0 for r in self._pool.replicas), default=0)
        for old in [v for v in self._paths if v < oldest]:
            del self._paths[old]
        self._signal.notify()
        return True

    async def _watch_outage(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._judge_releases()
            if self._pool.version is not None or self.newest is None or self.resting:
                self._pool.last_available = time.monotonic()
                continue
            # Engines load and compile for a long time at the start; later the same silence means
            # that they are gone.
            limit = OUTAGE_SECONDS if self._ever_synced else STARTUP_SECONDS
            if time.monotonic() - self._pool.last_available > limit:
                raise RoleError(f"no engine could be used for {limit:g} s: {self._pool.problems()}")

    def _judge_releases(self) -> None:
        """Raise an error if all engines have a release that is incompatible with this one.

        Raises:
            RoleError: permanent before the first hand-over. Afterwards retryable, because the next attempt renews
                all roles.
        """
        now, replicas = time.monotonic(), self._pool.replicas
        if not replicas or not all(replica.foreign for replica in replicas):
            self._foreign_since = None
            return
        self._foreign_since = now if self._foreign_since is None else self._foreign_since
        if now - self._foreign_since >= FOREIGN_SECONDS:
            code = exit_codes.FAILURE if self._ever_synced else exit_codes.CONFIGURATION
            raise RoleError(replicas[0].failure, code)


async def _check_answers(replica: Replica) -> None:
    """Check that a replica answers at all, so that a hanging or starting one does not block a hand-over for its full
    timeout.

    Raises:
        EngineError: the replica does not answer or refuses.
    """
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            answer = await replica.client.status()
    except TimeoutError:
        raise EngineUnavailableError("it does not answer yet") from None
    problem = explain_mismatch(of_status(answer.get("protocol"), answer.get("release")), OWN)
    if problem is not None:
        raise EngineError(problem, REFUSED)


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
        # A running hand-over must end first: it would wake an engine that already sleeps.
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
