"""Processes in the pods: work of the roles and their ends."""

from __future__ import annotations

from typing import Any

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.runtime import exit_codes
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, attempt_of, run_uid_of
from rlrun_operator.times import format_rfc3339, seconds_of
from tests.sim.clock import Clock
from tests.sim.cluster.api import Api, Json
from tests.sim.cluster.fleet import Fleet
from tests.sim.cluster.pods import has_sidecar, is_up
from tests.sim.cluster.volume import CHECKPOINT_EVERY, Volume

WISHES = (keys.ENGINES_WANTED, keys.ENGINES_SPOT, keys.ENGINES_WINDOW)
"""Annotations of the operator, which a report keeps."""
SIDECAR_SECONDS = 12.0
"""Time for which a native sidecar outlives the role's container."""


class Roles:
    """Trainers, engines and orchestrators over one API server.

    Args:
        api: API server.
        clock: clock of the cluster.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        self.api, self.clock = api, clock
        self.volume = Volume()
        self.reported: set[tuple[str, int]] = set()
        """Run UID and attempt of orchestrators that have trained."""
        self.failures = 0
        """Number of processes that ended on their own with a code other than 0."""
        self.fleet: Fleet | None = None
        """Engines and their load in the engine histories."""
        self.ended: set[tuple[int, str, int]] = set()
        """Attempt, pod and code of processes that ended without a request."""

    def pods(self, role: str) -> list[Json]:
        """Return the pods of a role, including ending ones, by name."""
        found = [o for o in self.api.all("Pod") if o["metadata"]["labels"].get(ROLE_LABEL) == role]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, role: str, index: int) -> Json | None:
        """Return a pod that is not ending, or None."""
        found = [pod for pod in self.pods(role) if "deletionTimestamp" not in pod["metadata"]]
        return found[index % len(found)] if found else None

    def training(self) -> Json | None:
        """Return the orchestrator whose attempt can train because all its pods are up, or None."""
        orchestrator = self.pod("orchestrator", -1)
        if orchestrator is None or not is_up(orchestrator):
            return None
        attempt = attempt_of(orchestrator["metadata"])
        owner = self.api.get("StatefulSet", f"{orchestrator['metadata']['labels'][RUN_LABEL]}-trainer")
        trainers = [p for p in self.pods("trainer") if attempt_of(p["metadata"]) == attempt and is_up(p)]
        whole = (
            owner is not None
            and RUN_LABEL in owner["metadata"]["labels"]
            and len(trainers) >= max(1, owner["spec"]["replicas"])
        )
        engines = [pod for pod in self.pods("inference") if is_up(pod)]
        return orchestrator if whole and engines and attempt in self.volume.step else None

    def train(self, steps: int, until: int) -> None:
        """Train some steps of the current attempt and report them; after the last step the orchestrator succeeds."""
        orchestrator = self.training()
        if orchestrator is None:
            return
        attempt = attempt_of(orchestrator["metadata"]) or 0
        volume = self.volume
        for _ in range(steps):
            if volume.step[attempt] < until:
                volume.step[attempt] += 1
                if volume.step[attempt] % CHECKPOINT_EVERY == 0:
                    volume.complete = max(volume.complete, volume.step[attempt])
        self.reported.add((str(run_uid_of(orchestrator["metadata"])), attempt))
        self.report(attempt, orchestrator["metadata"]["labels"][RUN_LABEL])
        if volume.step[attempt] >= until:
            volume.complete = max(volume.complete, until)
            self.exit(orchestrator, exit_codes.OK)

    def report(self, attempt: int, run: str) -> None:
        """Renew the orchestrator's Lease."""
        lease = self.api.get("Lease", f"{run}-progress")
        if lease is None or RUN_LABEL not in lease["metadata"]["labels"]:
            return
        volume = self.volume
        said = {
            keys.ATTEMPT: attempt,
            keys.STEP: volume.step[attempt],
            keys.CHECKPOINT_STEP: volume.complete or None,
            keys.RESUMED_FROM_STEP: volume.begun_at[attempt] or None,
            keys.POLICY_VERSION: volume.step[attempt],
            keys.REWARD: 0.5,
        }
        annotations = {k: str(v) for k, v in said.items() if v is not None}
        if self.fleet is not None:
            found = lease["metadata"].get("annotations") or {}
            wishes = {key: found[key] for key in WISHES if key in found}
            engines = self.fleet.report(attempt, self.pods("inference"), wishes, self.clock.steady())
            annotations |= wishes | engines
        metadata = lease["metadata"] | {"annotations": annotations}
        spec = lease["spec"] | {"renewTime": f"{format_rfc3339(self.clock.now())}+{self.api.version}"}
        self.api.put(lease, metadata=metadata, spec=spec)

    def exit(self, pod: Json, code: int, *, message: str = "", reason: str = "") -> None:
        """End the role's process. A trainer's container restarts and holds, an engine's restarts, the orchestrator's
        does not.
        """
        role = pod["metadata"]["labels"][ROLE_LABEL]
        end = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        ended = {"terminated": end | {"finishedAt": format_rfc3339(self.clock.now())}}
        taken = code == exit_codes.ATTEMPT_TAKEN and bool(message)
        self.failures += code != exit_codes.OK and not taken
        self.ended.add((attempt_of(pod["metadata"]) or 0, str(pod["metadata"]["name"]), code))
        status = {"conditions": [{"type": "Ready", "status": "False"}], "phase": "Running"}
        entry: dict[str, Any] = {"name": role, "ready": False, "restartCount": 1, "state": {"running": {}}}
        if role == "orchestrator":
            entry |= {"restartCount": 0, "state": ended}
        elif role == "inference":
            status["conditions"] = [{"type": "Ready", "status": "True"}]
            entry |= {"ready": True, "lastState": ended}
        else:
            entry |= {"lastState": ended}
        new = self.api.put(pod, status=pod["status"] | status | {"containerStatuses": [entry]})
        if role == "orchestrator" and not has_sidecar(pod):
            self._finish(new, code)

    def _are_sidecars_done(self, end: Json) -> bool:
        return self.clock.now() >= (seconds_of(end["finishedAt"]) or 0.0) + SIDECAR_SECONDS

    def _finish(self, pod: Json, code: int) -> None:
        """End all containers of the pod."""
        self.api.put(pod, status=pod["status"] | {"phase": "Failed" if code else "Succeeded"})
