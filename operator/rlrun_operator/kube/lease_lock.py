"""Lock on a Lease for several candidates: acquired, renewed, and taken over once its holder lets it expire.

Clocks of other machines are not compared: a Lease has expired if this process saw no renewal for its whole duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rlrun_operator.kube.client import ApiError, Call, Client
from rlrun_operator.kube.resources import LEASE
from rlrun_operator.names import MANAGER
from rlrun_operator.state import Manifest

LONGEST_SECONDS = 120.0
"""Maximum accepted lease duration: any client with the right to write Leases may have set a longer one."""
TRANSITIONS_MAX = 2**31 - 1
"""Maximum number of transitions that the API accepts."""


@dataclass
class _Seen:
    """Last observed state of the Lease."""

    record: Manifest
    changed_at: float
    """Time of the last observed change (steady clock)."""


class LeaseLock:
    """Candidate for one Lease.

    Args:
        client: client of the API server.
        namespace: namespace of the Lease.
        name: name of the Lease.
        identity: unique identity of the candidate.
        duration: seconds for which a renewal is valid.
        clock: steady seconds.
    """

    def __init__(
        self, client: Client, namespace: str, name: str, identity: str, *, duration: int, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration
        self._clock = clock
        self._seen: _Seen | None = None
        self._is_rewound = False

    @property
    def holder(self) -> str:
        """Last observed holder of the Lease; empty if there is none."""
        return str((self._seen.record.get("spec") or {}).get("holderIdentity") or "") if self._seen else ""

    def take_rewound(self) -> bool:
        """Return True once after the Lease was older than before, or was missing: etcd was restored from a backup."""
        found, self._is_rewound = self._is_rewound, False
        return found

    async def release(self) -> None:
        """Release the Lease, so that the next candidate takes over at once.

        Raises:
            ApiError, UnavailableError: the release failed; the Lease expires by itself.
        """
        if self._seen is not None:
            spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time()}
            await self._patch_lease(self._seen.record["metadata"]["resourceVersion"], spec)

    async def acquire_or_renew(self) -> bool:
        """Acquire or renew the Lease. Returns whether this candidate holds it now.

        Raises:
            ApiError, UnavailableError: the Lease cannot be read or written.
        """
        # Create a missing Lease: POST fails for all candidates but one. A Lease that disappears shows a restored etcd.
        record = await self._client.get(LEASE, self._namespace, self._name)
        if record is None:
            self._is_rewound |= self._seen is not None
            created = await self._client.request(
                Call("POST", "create", LEASE.plural, LEASE.path(self._namespace)), body=self._new_lease()
            )
            self._record_observation(created)
            return True
        # Leave a Lease alone while another holder keeps it fresh, by this process's own clock.
        self._record_observation(record)
        spec = record.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        mine = holder == self._identity
        if holder and not mine and not self._is_expired(spec):
            return False
        # Renew or take over, with the observed version as a precondition: of two candidates only one write succeeds.
        change: dict[str, object] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration,
            "renewTime": _micro_time(),
        }
        if not mine:
            change |= {
                "acquireTime": change["renewTime"],
                "leaseTransitions": min(int(spec.get("leaseTransitions") or 0) + 1, TRANSITIONS_MAX),
            }
        try:
            self._record_observation(await self._patch_lease(record["metadata"]["resourceVersion"], change))
        except ApiError as error:
            # Another candidate was faster, or the previous attempt of this process arrived late.
            if error.status == 409 and not error.kept_out:
                return False if not mine else await self.acquire_or_renew()
            raise
        return True

    async def _patch_lease(self, version: str, spec: Mapping[str, object]) -> dict[str, object]:
        # Not `Client.merge_patch`, which requires that this process leads.
        return await self._client.request(
            Call("PATCH", "patch", LEASE.plural, LEASE.path(self._namespace, self._name)),
            body={"metadata": {"resourceVersion": version}, "spec": spec},
            content="application/merge-patch+json",
        )

    def _record_observation(self, record: Manifest) -> None:
        self._is_rewound |= self._seen is not None and _version_number(record) < _version_number(self._seen.record)
        if self._seen is None or self._seen.record.get("spec") != record.get("spec"):
            self._seen = _Seen(record, self._clock())
        else:
            self._seen.record = record

    def _is_expired(self, spec: Manifest) -> bool:
        duration = min(float(spec.get("leaseDurationSeconds") or self._duration), LONGEST_SECONDS)
        return self._seen is None or self._clock() - self._seen.changed_at > duration

    def _new_lease(self) -> dict[str, object]:
        now = _micro_time()
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {"app.kubernetes.io/name": "rlrun", "app.kubernetes.io/managed-by": MANAGER},
            },
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._duration,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }


def _version_number(record: Manifest) -> int:
    """Return the resourceVersion as a number; 0 if it is not a number, so that nothing counts as older."""
    text = str(record["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
