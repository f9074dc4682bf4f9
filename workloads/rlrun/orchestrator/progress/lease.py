"""The run's progress for the operator: one Lease, renewed while the orchestrator lives, with the progress as annotations.

The orchestrator's service account may get and patch this one object. A renewal may fail as long as it likes: the run never waits for the
API server, and never fails because of it. While no renewal succeeds, the kubelet is the second channel: an orchestrator whose run
does not get on either calls itself not ready.
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
from rlrun.orchestrator.engines.operator_requests import Wishes
from rlrun.orchestrator.progress.server import Progress
from rlrun.protocol.messages import annotations as names
from rlrun.protocol.messages.annotations import DRAINED_MAX, RENEW_SECONDS, RESULT_MAX, RESULTS_MAX
from rlrun.protocol.messages.engine_load import EngineLoad
from rlrun.protocol.messages.start_times import start_text

CHANGE_SECONDS = 5.0
"""Shortest time between two renewals: all runs together renew within what one API server bears."""
YOUNG_SECONDS = 60.0
YOUNG_CHANGE_SECONDS = 2.0
"""The same while an attempt begins, when people look, for so many seconds."""
LOOK_SECONDS = 0.25
REQUEST_SECONDS = 10.0
FAREWELL_SECONDS = 5.0
LOST_SECONDS = 60.0
"""Renewals that have failed for so long make the Lease lost; its watchers take it for stale then."""
STALL_SECONDS = 300.0
"""While the Lease is lost, a run without a move for so long calls itself not ready. Its deadlines are judged elsewhere, from then on."""
CREDENTIALS = Path("/var/run/secrets/rlrun")
"""Folder of `token` and `ca.crt`."""
_NUMBERS = re.compile(r"\d+(\.\d+)?")


class LeaseError(Exception):
    """The API server refused or did not answer."""


class ApiServer:
    """One connection to the API server, kept from renewal to renewal: a handshake costs both sides more than the request.

    Args:
        url: of the server.
        namespace: of the Lease.
        credentials: folder of `token` and `ca.crt`; both rotate while the run goes on.
    """

    def __init__(self, url: str, namespace: str, credentials: Path = CREDENTIALS) -> None:
        self._leases = f"{url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._url, self._credentials = url, credentials
        self._session: aiohttp.ClientSession | None = None
        self._authority = b""
        """Certificates that the session trusts."""

    async def patch_lease(self, name: str, patch: Mapping[str, object]) -> str:
        """Merge `patch` into the Lease `name`. Returns the whole object as JSON.

        Raises:
            LeaseError: why it did not work.
        """
        try:
            token, authority = await asyncio.to_thread(self._read)
            kept = self._session is not None and authority == self._authority
            try:
                return await self._request(name, patch, token, authority)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not kept:
                    raise
                await self.close()  # the server has closed it since the last renewal
                return await self._request(name, patch, token, authority)
        except TimeoutError:
            await self.close()  # nobody may be at its other end
            raise LeaseError(f"{self._url} did not answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            await self.close()
            raise LeaseError(str(error) or type(error).__name__) from error

    async def _request(self, name: str, patch: Mapping[str, object], token: str, authority: bytes) -> str:
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
        """Close the connection; the next renewal opens another one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _read(self) -> tuple[str, bytes]:
        return (self._credentials / "token").read_text().strip(), (self._credentials / "ca.crt").read_bytes()


def _shorten_message(text: str) -> str:
    found = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)
    return (found[1] if found else text.strip())[:300]


def progress_annotations(progress: Progress, attempt: int) -> dict[str, str | None]:
    """The Lease's annotations; None removes what an earlier attempt wrote and is not known of this one."""

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
    """Renews the Lease of one run.

    Args:
        name: the Lease, which exists.
        holder: this pod's name.
        attempt: the attempt.
        server: the API server.
        look: the current progress.
        wishes: gets what the answers say.
        clock: steady seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        holder: str,
        attempt: int,
        server: ApiServer,
        look: Callable[[], Progress],
        wishes: Wishes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wishes = wishes or Wishes()
        self._name, self._holder, self._attempt = name, holder, attempt
        self._server, self._look, self._clock = server, look, clock
        self._began = clock()
        self._renewed = self._began - RENEW_SECONDS
        self._told: object = None
        self._outage: float | None = None
        self._moves: object = None
        self._moved = clock()

    async def run(self) -> None:
        """Renew until cancelled: soon after a change, and often enough without one."""
        try:
            while True:
                idle = self._clock() - self._renewed
                if idle >= RENEW_SECONDS or (idle >= self._least() and self._key(self._look()) != self._told):
                    await self.renew()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._server.close()

    def _least(self) -> float:
        """Shortest time between two renewals, in seconds."""
        return YOUNG_CHANGE_SECONDS if self._clock() - self._began < YOUNG_SECONDS else CHANGE_SECONDS

    async def renew(self) -> None:
        """Renew once. A failure is logged once per outage, and tried again with the pace of renewals on a change."""
        progress = self._look()
        self._note(progress)
        try:
            self._wishes.take(await self._server.patch_lease(self._name, self._patch(progress)))
        except LeaseError as error:
            if self._outage is None:
                self._outage = self._clock()
                logger.warning(f"the progress Lease {self._name} cannot be renewed, which the run survives: {error}")
            self._told = None
        else:
            if self._outage is not None:
                logger.info(f"the progress Lease is renewed again after {self._clock() - self._outage:.0f} s")
                self._outage = None
            self._told = self._key(progress)
            reach("lease.renewed")
        self._renewed = self._clock()

    def _note(self, progress: Progress) -> None:
        """Remember when the run moved last. A run that waits for its volume goes on by itself, so that it does not stall."""
        moves = progress.step, progress.activity
        if moves != self._moves or progress.storage is not None:
            self._moves, self._moved = moves, self._clock()

    def stall(self) -> str | None:
        """Reason to be called not ready: nobody can see the run, and it does not get on; None: there is none."""
        now = self._clock()
        if self._outage is None or now - self._outage < LOST_SECONDS or now - self._moved < STALL_SECONDS:
            return None
        waits = self._look().waiting_on
        return f"no move for {now - self._moved:.0f} s, and the progress Lease cannot be renewed; it waits for {waits}"

    async def farewell(self) -> None:
        """The last renewal, with the last step; given up after a few seconds."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.renew()
        except TimeoutError:
            logger.warning(f"the progress Lease {self._name} could not be told of the end")

    def _patch(self, progress: Progress) -> dict[str, object]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "metadata": {"annotations": progress_annotations(progress, self._attempt)},
            "spec": {"renewTime": now, "holderIdentity": self._holder},
        }

    @staticmethod
    def _key(progress: Progress) -> object:
        """Key of a change: steps, role and phase waited for, and volume trouble. Numbers in words tick all the time and do not count."""
        phase = _NUMBERS.sub("", progress.waiting_phase or "")
        trouble = _NUMBERS.sub("", progress.storage.text) if progress.storage is not None else None
        steps = progress.step, progress.policy_version, progress.checkpoint_step
        return *steps, progress.waiting_role, phase, trouble, progress.engines_drained


def stall_of(lease: ProgressLease | None) -> Callable[[], str | None]:
    """`ProgressLease.stall`; without a Lease there is never a reason."""
    return lease.stall if lease is not None else lambda: None


def lease_from_environment(
    env: Mapping[str, str] = os.environ,
    *,
    attempt: int,
    look: Callable[[], Progress],
    wishes: Wishes | None = None,
    credentials: Path = CREDENTIALS,
) -> ProgressLease | None:
    """The Lease that the pod's environment names; None outside a cluster.

    Args:
        env: `RLRUN_PROGRESS_LEASE`, `RLRUN_NAMESPACE`, `RLRUN_POD_NAME`, `KUBERNETES_SERVICE_HOST`, `KUBERNETES_SERVICE_PORT`.
        attempt: the attempt.
        look: the current progress.
        wishes: gets what the operator asks for.
        credentials: folder of `token` and `ca.crt`.
    """
    name, host = env.get("RLRUN_PROGRESS_LEASE"), env.get("KUBERNETES_SERVICE_HOST")
    if not name:
        return None
    if not host:
        logger.warning("RLRUN_PROGRESS_LEASE is set without KUBERNETES_SERVICE_HOST: nobody is told of the progress")
        return None
    host = f"[{host}]" if ":" in host else host
    server = ApiServer(
        f"https://{host}:{env.get('KUBERNETES_SERVICE_PORT', '443')}",
        env.get("RLRUN_NAMESPACE", "default"),
        credentials,
    )
    holder = env.get("RLRUN_POD_NAME", "")
    return ProgressLease(name, holder=holder, attempt=attempt, server=server, look=look, wishes=wishes)
