"""MLflow tracker through its REST API, version 2.0. It needs no package, and each answer confirms that the server has the data.

The run is found by its tag `rlrun.uid`. A point has the time of its step, so a point that is sent twice is stored once.
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlsplit

from rlrun.config.models.trackers import MlflowConfig
from rlrun.tracking.backends.tracker_packages import MLFLOW_ADDRESS
from rlrun.tracking.tracker_records import Mark, Record, TrackedRun, TrackerError

DEFAULT_EXPERIMENT = "rlrun"
REQUEST_SECONDS = 30.0
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""Limits of one request in MLflow's API."""
_PARAMETER_CHARACTERS = 500
_NOT_IN_NAMES = re.compile(r"[^-\w./ ]", re.ASCII)
UID_TAG = "rlrun.uid"
_UNLIKE = "does not answer like an MLflow server; set tracking.mlflow.uri to the address of one"


def metric_key(name: str) -> str:
    """Return a metric's name for MLflow, which allows neither @ nor brackets."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def flatten_document(value: object, path: str = "") -> dict[str, str]:
    """Return the leaves of a document as texts, by dotted path."""
    if isinstance(value, Mapping) and value:
        return {
            k: v
            for name, inner in value.items()
            for k, v in flatten_document(inner, f"{path}.{name}".lstrip(".")).items()
        }
    return {path: (value if isinstance(value, str) else json.dumps(value))[:_PARAMETER_CHARACTERS]}


class MlflowTracker:
    """A run in MLflow.

    Args:
        config: configuration of the tracker.
        environ: environment variables with MLflow's settings.
    """

    def __init__(self, config: MlflowConfig, environ: Mapping[str, str]) -> None:
        uri = config.uri or environ.get("MLFLOW_TRACKING_URI", "")
        if not uri.startswith(("http://", "https://")):
            raise TrackerError(MLFLOW_ADDRESS, permanent=True)
        self._uri = uri.rstrip("/")
        self._experiment = config.experiment or environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        self._name = config.name
        self._headers = {"Content-Type": "application/json"} | _read_credentials(environ)
        self._run_id, self._artifacts = "", ""
        self._metrics: list[dict[str, object]] = []

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """See `Tracker.open`."""
        experiment = self._experiment_id()
        query = {"experiment_ids": [experiment], "filter": f"tags.`{UID_TAG}` = '{run.uid}'", "max_results": 1}
        found = self._call_api("runs/search", query).get("runs")
        known = found[0] if isinstance(found, list) and found else None
        if known is not None:
            info = self._get_object({"run": known}, "run", "info")
            self._call_api("runs/update", {"run_id": info.get("run_id"), "status": "RUNNING"})
        else:
            tags = [{"key": UID_TAG, "value": run.uid}]
            wanted = {
                "experiment_id": experiment,
                "run_name": self._name or run.name,
                "start_time": _now_milliseconds(),
                "tags": tags,
            }
            info = self._get_object(self._call_api("runs/create", wanted), "run", "info")
        self._run_id, self._artifacts = str(info.get("run_id", "")), str(info.get("artifact_uri", ""))
        if known is None:
            self._send_config(run)
        return 0 if known is None else confirmed

    def _experiment_id(self) -> str:
        name = quote(self._experiment)
        try:
            answer = self._call_api(f"experiments/get-by-name?experiment_name={name}")
            return str(self._get_object(answer, "experiment").get("experiment_id"))
        except TrackerError as error:
            if not isinstance(error, _AnswerError) or error.status != 404:
                raise
        return str(self._call_api("experiments/create", {"name": self._experiment}).get("experiment_id"))

    def _send_config(self, run: TrackedRun) -> None:
        parameters = [{"key": metric_key(k), "value": v} for k, v in flatten_document(run.config).items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._call_api(
                "runs/log-batch", {"run_id": self._run_id, "params": parameters[start : start + _MOST_PARAMETERS]}
            )
        self._store_file("config.json", json.dumps(run.config, indent=1).encode())

    def log(self, number: int, record: Record) -> None:
        """See `Tracker.log`. Histograms are left out, because MLflow does not support them."""
        stamp = int((record.time or time.time()) * 1000)
        self._metrics += [
            {"key": metric_key(name), "value": value, "timestamp": stamp, "step": record.mark.step}
            for name, value in record.scalars.items()
            if math.isfinite(value)
        ]
        for name, rows in record.samples.items():
            lines = [dict(zip(rows[0].COLUMNS, row.row_values(), strict=True)) for row in rows]
            content = json.dumps({"columns": list(rows[0].COLUMNS), "data": [list(line.values()) for line in lines]})
            self._store_file(f"{name}/step_{record.mark.step:08d}.json", content.encode())

    def flush(self) -> None:
        """See `Tracker.flush`."""
        while self._metrics:
            self._call_api("runs/log-batch", {"run_id": self._run_id, "metrics": self._metrics[:_MOST_METRICS]})
            del self._metrics[:_MOST_METRICS]

    def close(self, *, complete: bool) -> None:
        """See `Tracker.close`."""
        status = "FINISHED" if complete else "KILLED"
        self._call_api("runs/update", {"run_id": self._run_id, "status": status, "end_time": _now_milliseconds()})

    def _store_file(self, path: str, content: bytes) -> None:
        """Store a file with the run, if the server stores files itself."""
        parts = urlsplit(self._artifacts)
        if parts.scheme != "mlflow-artifacts":
            return
        self._send_request(f"mlflow-artifacts/artifacts/{quote(parts.path.strip('/'))}/{quote(path)}", content, "PUT")

    def _call_api(self, path: str, document: Mapping[str, object] | None = None) -> dict[str, object]:
        content = None if document is None else json.dumps(document).encode()
        answer = self._send_request(f"mlflow/{path}", content, "GET" if document is None else "POST")
        try:
            found = json.loads(answer or b"{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TrackerError(f"{self._uri} {_UNLIKE}")
        return found

    def _get_object(self, answer: Mapping[str, object], *path: str) -> Mapping[str, object]:
        """Return an object within an answer."""
        found: object = answer
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise TrackerError(f"{self._uri} {_UNLIKE}")
        return found

    def _send_request(self, path: str, content: bytes | None, method: str) -> bytes:
        request = urllib.request.Request(
            f"{self._uri}/api/2.0/{path}", data=content, headers=self._headers, method=method
        )
        try:
            with _OPENER.open(request, timeout=REQUEST_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise _AnswerError(self._uri, error) from None
        except OSError as error:
            raise TrackerError(f"MLflow at {self._uri} does not answer: {getattr(error, 'reason', error)}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejection of redirects: urllib would send the credentials to any address that the server names, and turn a POST into a GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: object, code: int, msg: str, headers: object, newurl: str
    ) -> urllib.request.Request | None:
        place = urlsplit(newurl)
        raise TrackerError(
            f"MLflow at {urlsplit(req.full_url).hostname} redirects to {place.scheme}://{place.hostname}, "
            "but credentials are not sent to redirected addresses; "
            "set tracking.mlflow.uri to the final address of the server",
            permanent=True,
        )


_OPENER = urllib.request.build_opener(_NoRedirects)


class _AnswerError(TrackerError):
    def __init__(self, uri: str, error: urllib.error.HTTPError) -> None:
        self.status = error.code
        said = " ".join(error.read(400).decode(errors="replace").split())
        fix = (
            "; set MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN" if error.code in (401, 403) else ""
        )
        super().__init__(f"MLflow at {uri} rejected the request: {error.code} {said}{fix}")


def _read_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    if token := environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user, password = environ.get("MLFLOW_TRACKING_USERNAME"), environ.get("MLFLOW_TRACKING_PASSWORD")
    if user is None or password is None:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _now_milliseconds() -> int:
    return int(time.time() * 1000)
