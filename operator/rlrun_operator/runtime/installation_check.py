"""Check of an installation: `rlrun-operator --check`, which `helm test` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlrun_operator.kube.client import ApiError, Client
from rlrun_operator.kube.resources import LEASE
from rlrun_operator.runtime import preflight
from rlrun_operator.runtime.leader_election import LEADER_RENEW_SECONDS
from rlrun_operator.settings import OperatorSettings

Sleep = Callable[[float], Awaitable[None]]


async def find_faults(client: Client, settings: OperatorSettings, *, sleep: Sleep = asyncio.sleep) -> list[str]:
    """Return the faults of the installation: missing resource, missing rights, or no leading operator.

    Raises:
        UnavailableError: the API server does not answer.
    """
    found = await preflight.find_problems(client, settings.namespaces, settings.pod_namespace)
    stopped = await _not_leading(client, settings, sleep)
    return [*found, stopped] if stopped else found


async def _not_leading(client: Client, settings: OperatorSettings, sleep: Sleep) -> str:
    """Return a fault if no operator renews the leader Lease, else an empty string. Clocks of other machines are not compared."""
    what = f"Lease {settings.pod_namespace}/{settings.lease_name}"
    fix = f"kubectl -n {settings.pod_namespace} logs deployment/{settings.lease_name}"
    try:
        before = await client.get(LEASE, settings.pod_namespace, settings.lease_name)
        if before is not None:
            await sleep(LEADER_RENEW_SECONDS)
        now = await client.get(LEASE, settings.pod_namespace, settings.lease_name)
    except ApiError as error:
        return f"{what} cannot be read: {error}"
    if before is None or now is None:
        return f"{what} does not exist, so no operator of this release leads; see {fix}"
    if before["spec"].get("renewTime") == now["spec"].get("renewTime"):
        return f"{what} was not renewed within {LEADER_RENEW_SECONDS:g} s, so no operator of this release works; see {fix}"
    return ""
