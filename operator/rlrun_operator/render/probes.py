"""Probes of the containers. The roles answer them; see `rlrun.protocol.messages.endpoints`."""

from __future__ import annotations

from rlrun.protocol.messages import endpoints
from rlrun_operator.names import Role
from rlrun_operator.state import Json

ENGINE_START_SECONDS = 7200
"""Longest start of an engine: it may have to fetch hundreds of gigabytes and compile."""
ORCHESTRATOR_START_SECONDS = 1800
"""Longest wait until the orchestrator serves its metrics, which it does before it waits for anything itself."""
_START_PERIOD_SECONDS = 2
_READY_PERIOD_SECONDS = 3


def container_probes(role: Role) -> dict[str, object]:
    """Return the probes of a role's container.

    The trainer has no liveness probe: its container is never restarted within an attempt, and the run's progress shows a group that hangs.
    The liveness probes of the other roles only fail after minutes without an answer.
    """
    if role == "trainer":
        return {"readinessProbe": _readiness_probe(endpoints.POD_READY, endpoints.POD_PORT)}
    if role == "inference":
        path, port, start, ready = (
            endpoints.ENGINE_HEALTH,
            endpoints.ENGINE_PORT,
            ENGINE_START_SECONDS,
            endpoints.ENGINE_READY,
        )
    else:
        path, port, start, ready = (
            endpoints.ORCHESTRATOR_HEALTH,
            endpoints.ORCHESTRATOR_PORT,
            ORCHESTRATOR_START_SECONDS,
            endpoints.ORCHESTRATOR_READY,
        )
    return {
        "startupProbe": _http_probe(path, port, period=_START_PERIOD_SECONDS, failures=start // _START_PERIOD_SECONDS),
        "livenessProbe": _http_probe(path, port, period=15, timeout=10, failures=12),
        "readinessProbe": _readiness_probe(ready, port),
    }


def _readiness_probe(path: str, port: int) -> Json:
    return _http_probe(path, port, period=_READY_PERIOD_SECONDS, timeout=3, failures=3)


def _http_probe(path: str, port: int, *, period: int, failures: int, timeout: int = 2) -> dict[str, object]:
    """Return a probe by HTTP GET, which succeeds with a status 2xx.

    Args:
        path: path that needs no key.
        port: port of the container.
        period: seconds between two requests.
        failures: number of failures in a row until the probe fails.
        timeout: seconds until a request fails.
    """
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
