"""Progress of the run for the operator: one Lease, renewed while the orchestrator lives, with the progress as
annotations.

The orchestrator's service account may only get and patch this object. A renewal may fail for any time: the run never
waits for the API server and never fails because of it. While no renewal succeeds, the kubelet is the second channel: an
orchestrator whose run makes no progress either reports that it is not ready.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.progress.progress_server import Progress
from rlrun.protocol.messages import lease_annotations as names
from rlrun.protocol.messages.lease_annotations import (
    DRAINED_MAX,
    RENEW_SECONDS,
    RESULT_MAX,
    RESULTS_MAX,
    EngineLoad,
    start_text,
)

CHANGE_SECONDS = 5.0
"""Shortest time between two renewals, which limits the load of all runs on one API server."""
YOUNG_SECONDS = 60.0
YOUNG_CHANGE_SECONDS = 2.0
"""Shortest time between two renewals during the first `YOUNG_SECONDS` of an attempt, when people watch."""
LOOK_SECONDS = 0.25
REQUEST_SECONDS = 10.0
FAREWELL_SECONDS = 5.0
LOST_SECONDS = 60.0
"""Seconds of failed renewals after which the Lease counts as lost; its watchers consider it stale then."""
STALL_SECONDS = 300.0
"""Seconds without progress after which a run with a lost Lease reports that it is not ready. From then on the watchers
apply the deadlines.
"""
CREDENTIALS = Path("/var/run/secrets/rlrun")
"""Folder of `token` and `ca.crt`."""
_NUMBERS = re.compile(r"\d+(\.\d+)?")


class LeaseError(Exception):
    """The API server refused the request or did not answer."""


class ApiServer:
    """Persistent connection to the API server. A handshake for each renewal would cost both sides more than the
    request.

    Args:
        url: address of the server.
        namespace: namespace of the Lease.
        credentials: folder of `token` and `ca.crt`, which both rotate during the run.
    """

    def __init__(self, url: str, namespace: str, credentials: Path = CREDENTIALS) -> None:
        self._leases = f"{url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._url, self._credentials = url, credentials
        self._session: aiohttp.ClientSession | None = None
        self._authority = b""
        """Certificates that the session trusts."""

    async def patch_lease(self, name: str, patch: Mapping[str, object]) -> str:
        """Merge `patch` into the Lease `name` and return the complete object as JSON.

        Raises:
            LeaseError: the request failed; the message contains the reason.
        """
        try:
            token, authority = await asyncio.to_thread(self._read_credentials)
            kept = self._session is not None and authority == self._authority
            try:
                return await self._send_patch(name, patch, token, authority)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not kept:
                    raise
                await self.close()  # the server has closed it since the last renewal
                return await self._send_patch(name, patch, token, authority)
        except TimeoutError:
            await self.close()  # the connection may be dead
            raise LeaseError(f"{self._url} did not answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            await self.close()
            raise LeaseError(str(error) or type(error).__name__) from error

    async def _send_patch(self, name: str, patch: Mapping[str, object], token: str, authority: bytes) -> str:
        # The certificates have rotated, and the open session trusts the old ones.
        if self._session is not None and authority != self._authority:
            await self.close()
        if self._session is None:
            context = ssl.create_default_context(cadata=authority.decode("ascii"))
            connector = aiohttp.TCPConnector(ssl=context, keepalive_timeout=2 * RENEW_SECONDS)
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            self._session, self._authority = aiohttp.ClientSession(connector=connector, timeout=timeout), authority
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        async with self._session.patch(f"{self._leases}/{name}", json=patch, headers=headers) as response:
            text = await response.text()
            if response.status >= 300:
                raise LeaseError(f"the API server answered {response.status}: {_shorten_message(text)}")
            return text

    async def close(self) -> None:
        """Close the connection; the next renewal opens a new one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _read_credentials(self) -> tuple[str, bytes]:
        return (self._credentials / "token").read_text().strip(), (self._credentials / "ca.crt").read_bytes()


def _shorten_message(text: str) -> str:
    found = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)
    return (found[1] if found else text.strip())[:300]


def progress_annotations(progress: Progress, attempt: int) -> dict[str, str | None]:
    """Return the Lease's annotations. None removes the value of an earlier attempt that is unknown in this one."""

    def text(value: float | int | None, form: str = "d") -> str | None:
        return None if value is None else format(value, form)

    return {
        names.STEP: text(progress.step),
        names.TOTAL_STEPS: text(progress.max_steps),
        names.POLICY_VERSION: text(progress.policy_version),
        names.CHECKPOINT_STEP: text(progress.checkpoint_step),
        names.RESUMED_FROM_STEP: text(progress.resumed_from_step),
        names.REWARD: text(progress.reward, ".4f"),
        names.TOKENS_PER_SECOND: text(progress.tokens_per_second, ".1f"),
        names.STALENESS_MEAN: text(progress.staleness_mean, ".3f"),
        names.ETA_SECONDS: text(progress.eta_seconds, ".0f"),
        names.ATTEMPT: text(attempt),
        names.WAITING_ON: progress.waiting_on[:1024] or None,
        names.WAITING_ON_ROLE: progress.waiting_role,
        names.WAITING_ON_PHASE: progress.waiting_phase,
        names.WAITING_ON_SINCE: _lease_time(progress.waiting_since),
        names.ACTIVITY: text(progress.activity),
        names.STORAGE: None
        if progress.storage is None
        else f"{progress.storage.reason}: {progress.storage.text}"[:1024],
        names.START_SECONDS: None if progress.start_seconds is None else start_text(progress.start_seconds),
        names.TRAINED: None if not progress.tokens or not progress.samples else f"{progress.tokens} {progress.samples}",
        names.RESULTS: "\n".join(line[:RESULT_MAX] for line in progress.results[:RESULTS_MAX]) or None,
        names.ENGINES: None if progress.engine_load is None else EngineLoad(**progress.engine_load).text(),
        names.ENGINES_DRAINED: None
        if progress.engines_drained is None
        else " ".join(progress.engines_drained[:DRAINED_MAX]),
    }


def _lease_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ProgressLease:
    """Periodic renewal of the Lease of one run.

    Args:
        name: name of the existing Lease.
        holder: name of this pod.
        attempt: number of the attempt.
        server: API server.
        look: reader of the current progress.
        engine_requests: receiver of the operator's requests in the answers.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        holder: str,
        attempt: int,
        server: ApiServer,
        look: Callable[[], Progress],
        engine_requests: EngineRequests | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_requests = engine_requests or EngineRequests()
        self._name, self._holder, self._attempt = name, holder, attempt
        self._server, self._look, self._clock = server, look, clock
        self._began = clock()
        self._renewed = self._began - RENEW_SECONDS
        self._told: object = None
        self._outage: float | None = None
        self._moves: object = None
        self._moved = clock()

    async def run(self) -> None:
        """Renew until canceled: soon after a change, and periodically without one."""
        try:
            while True:
                idle = self._clock() - self._renewed
                if idle >= RENEW_SECONDS or (
                    idle >= self._least_pause() and self._renewal_key(self._look()) != self._told
                ):
                    await self.renew()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._server.close()

    def _least_pause(self) -> float:
        """Return the shortest time between two renewals, in seconds."""
        return YOUNG_CHANGE_SECONDS if self._clock() - self._began < YOUNG_SECONDS else CHANGE_SECONDS

    async def renew(self) -> None:
        """Renew once. A failure is logged once per outage and retried at the pace of renewals after a change."""
        progress = self._look()
        self._record_progress(progress)
        try:
            self._engine_requests.read_lease(await self._server.patch_lease(self._name, self._build_patch(progress)))
        except LeaseError as error:
            if self._outage is None:
                self._outage = self._clock()
                logger.warning(f"cannot renew the progress Lease {self._name}; the run continues: {error}")
            # The next look finds a difference, so the renewal is repeated soon and not only at the
            # next period.
            self._told = None
        else:
            if self._outage is not None:
                logger.info(
                    f"the progress Lease is renewed again after an outage of {self._clock() - self._outage:.0f} s"
                )
                self._outage = None
            self._told = self._renewal_key(progress)
            reach("lease.renewed")
        self._renewed = self._clock()

    def _record_progress(self, progress: Progress) -> None:
        """Record the time of the latest progress. A run that waits for its volume continues by itself, so it does not
        count as stalled.
        """
        moves = progress.step, progress.activity
        if moves != self._moves or progress.storage is not None:
            self._moves, self._moved = moves, self._clock()

    def stall(self) -> str | None:
        """Return the reason to report not ready, or None. The reason is a lost Lease together with a run without
        progress.
        """
        now = self._clock()
        if self._outage is None or now - self._outage < LOST_SECONDS or now - self._moved < STALL_SECONDS:
            return None
        waits = self._look().waiting_on
        return f"no progress for {now - self._moved:.0f} s and no renewal of the progress Lease; waiting on {waits}"

    async def farewell(self) -> None:
        """Renew for the last time, with the last step and a timeout of a few seconds."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.renew()
        except TimeoutError:
            logger.warning(
                f"cannot write the last step into the progress Lease {self._name}: no answer within {FAREWELL_SECONDS:g} s"
            )

    def _build_patch(self, progress: Progress) -> dict[str, object]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "metadata": {"annotations": progress_annotations(progress, self._attempt)},
            "spec": {"renewTime": now, "holderIdentity": self._holder},
        }

    @staticmethod
    def _renewal_key(progress: Progress) -> object:
        """Return the fields whose change causes a renewal: steps, role and phase of the wait, volume trouble, drained
        engines. Numbers in texts change all the time and are ignored.
        """
        phase = _NUMBERS.sub("", progress.waiting_phase or "")
        trouble = _NUMBERS.sub("", progress.storage.text) if progress.storage is not None else None
        steps = progress.step, progress.policy_version, progress.checkpoint_step
        return *steps, progress.waiting_role, phase, trouble, progress.engines_drained


def stall_of(lease: ProgressLease | None) -> Callable[[], str | None]:
    """Return `ProgressLease.stall`, or without a Lease a function that returns None."""
    return lease.stall if lease is not None else lambda: None


def lease_from_environment(
    env: Mapping[str, str] = os.environ,
    *,
    attempt: int,
    look: Callable[[], Progress],
    engine_requests: EngineRequests | None = None,
    credentials: Path = CREDENTIALS,
) -> ProgressLease | None:
    """Create the Lease named in the pod's environment, or return None outside a cluster.

    Args:
        env: `RLRUN_PROGRESS_LEASE`, `RLRUN_NAMESPACE`, `RLRUN_POD_NAME`, `KUBERNETES_SERVICE_HOST`,
            `KUBERNETES_SERVICE_PORT`.
        attempt: number of the attempt.
        look: reader of the current progress.
        engine_requests: receiver of the operator's requests.
        credentials: folder of `token` and `ca.crt`.
    """
    name, host = env.get("RLRUN_PROGRESS_LEASE"), env.get("KUBERNETES_SERVICE_HOST")
    if not name:
        return None
    if not host:
        logger.warning(
            "RLRUN_PROGRESS_LEASE is set without KUBERNETES_SERVICE_HOST: the progress is not reported to the operator"
        )
        return None
    host = f"[{host}]" if ":" in host else host
    server = ApiServer(
        f"https://{host}:{env.get('KUBERNETES_SERVICE_PORT', '443')}",
        env.get("RLRUN_NAMESPACE", "default"),
        credentials,
    )
    holder = env.get("RLRUN_POD_NAME", "")
    return ProgressLease(
        name, holder=holder, attempt=attempt, server=server, look=look, engine_requests=engine_requests
    )
