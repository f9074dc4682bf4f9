"""The operator as a separate process, requests to the API server, and waits that fail without progress."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlparse
from weakref import WeakSet

from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from rlrun.local.preflight import free_port
from tests.cluster import Cluster
from tests.support.programs import tree_progress, wait_for_exit
from tests.support.slow import patience, program
from tests.support.waiting import PATIENCE_SECONDS, Wait

Json = dict[str, Any]
T = TypeVar("T")
MAIN = "from rlrun_operator.main import main; main()"
SIGNS_SECONDS = 5.0
"""Time without a change after which a wait reads the progress of everything in `WATCHED`, which costs some requests."""
STOP_SECONDS = 20.0
"""Less than the 30 s after which Kubernetes kills a pod."""
_STATE = "rlrun_operator_(leader|watch_age_seconds|queue)"
NOT_YET = "storage is (re)initializing"


class Watched(Protocol):
    """Part of a test whose progress extends each wait, and whose state explains a failed wait."""

    def progress(self) -> object:
        """Return a value that changes if the part makes progress."""

    def account(self) -> str:
        """Describe the present state."""


WATCHED: WeakSet[Watched] = WeakSet()
"""Running operators and namespaces under test."""


def wait_for(look: Callable[[], T], good: Callable[[T], bool], what: str, *, pause: float = 0.1) -> T:
    """Poll a state until it is good.

    Args:
        look: function that returns the present state.
        good: predicate of the awaited state.
        what: description of the awaited state.
        pause: seconds between two polls.

    Raises:
        StalledError: neither the state nor anything in `WATCHED` makes progress.
    """
    seen, signs = look(), ""

    def progress() -> str:
        nonlocal signs
        if wait.still >= SIGNS_SECONDS:
            signs = repr([one.progress() for one in WATCHED])
        return sha256(f"{_text(seen)}{signs}".encode()).hexdigest()[:8]

    def state() -> str:
        return "\n".join([_text(seen), *(one.account() for one in WATCHED)])

    wait = Wait(what, progress, state, pause, PATIENCE_SECONDS * patience())
    while not good(seen):
        wait.poll()
        time.sleep(pause)
        wait.woke()
        seen = look()
    return seen


def _text(seen: object) -> str:
    return seen if isinstance(seen, str) else json.dumps(seen, indent=1, default=str)


def _document(content: bytes, status: int) -> Json:
    """Parse the answer to a request. The API server refuses unknown paths in plain text."""
    try:
        answer: Json = json.loads(content or b"{}")
    except ValueError:
        if status < 400:
            raise
        return {"message": content.decode(errors="replace").strip()}
    return answer


class Kube:
    """JSON requests to the API server over one connection; each kubectl costs a second of CPU time."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = Configuration()
        load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._host = urlparse(str(configuration.host))
        self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        self._tls.load_cert_chain(str(configuration.cert_file), configuration.key_file)
        self._connection: http.client.HTTPSConnection | None = None

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, ok: bool = True) -> Json:
        """Send one request; PATCH is a merge patch.

        Raises:
            AssertionError: the server refused the request, unless `ok` is false: then the refusal is returned.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        wait = Wait(f"{path} is served", poll_seconds=0.1, patience=PATIENCE_SECONDS * patience())
        status, answer = self._send(method, path, data, kind)
        # The API server needs a moment for the objects of a new definition, and every client has to retry.
        while NOT_YET in str(answer.get("message")):
            wait.poll()
            time.sleep(wait.poll_seconds)
            wait.woke()
            status, answer = self._send(method, path, data, kind)
        assert status < 400 or not ok, f"{method} {path}: {answer.get('message')}"
        return answer

    def _send(self, method: str, path: str, data: str | None, kind: str) -> tuple[int, Json]:
        for again in (True, False):
            if self._connection is None:
                self._connection = self.connect()
            try:
                self._connection.request(method, path, data, {"Content-Type": kind})
                response = self._connection.getresponse()
                return response.status, _document(response.read(), response.status)
            except (OSError, http.client.HTTPException):
                self._connection.close()
                self._connection = None
                if not again:
                    raise
        raise AssertionError("unreachable")

    def connect(self, seconds: float = 10.0) -> http.client.HTTPSConnection:
        """Open a separate connection for answers that are not one JSON object. `seconds`: longest silence on it."""
        return http.client.HTTPSConnection(
            self._host.hostname or "", self._host.port, context=self._tls, timeout=seconds
        )

    def get(self, path: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        answer = self("GET", path, ok=False)
        # The API server refuses unknown resources in plain text, without a kind.
        return None if answer.get("kind", "Status") == "Status" else answer

    def items(self, path: str) -> list[Json]:
        """Return the items of a list."""
        return list(self("GET", path)["items"])


class OperatorProcess:
    """`rlrun-operator` as a process outside the cluster, with administrator rights.

    Args:
        environment: additional variables.
    """

    def __init__(self, cluster: Cluster, folder: Path, name: str = "operator-0", **environment: str) -> None:
        self.name = name
        self.log_file = folder / f"{name}.log"
        self.port = free_port()
        self._environment = {
            **cluster.environment,
            "POD_NAME": name,
            "RLRUN_HTTP_PORT": str(self.port),
            "RLRUN_READ_NODES": "true",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._checked = 0

    def start(self, *, ready: bool = True) -> Self:
        """Start the process and wait until it is ready."""
        WATCHED.add(self)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program(MAIN, "tests.controlplane.slow_operator.slow_down")],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if ready:
            self.wait_ready()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            error.add_note(self.account())
        if self.running:
            self.kill()

    def account(self) -> str:
        """Describe leadership, age of the watches and last log lines for the report of a failed test."""
        status, text = self.http("/metrics") if self.running else (0, "")
        shown = [line for line in text.splitlines() if re.match(_STATE, line)] if status == 200 else [text]
        return "\n".join(
            [f"operator {self.name}, {'running' if self.running else 'ended'}:", *shown, *self.log().splitlines()[-40:]]
        )

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def progress(self) -> object:
        """Return the size of the log and the CPU time above that of an idle operator."""
        return self.log_file.stat().st_size, tree_progress(self.pid)()

    def wait_ready(self) -> None:
        """Wait for /readyz and for leadership."""

        def state() -> str:
            if not self.running:
                return f"ended\n{self.log()}"
            status, text = self.http("/readyz")
            return text if status != 200 else f"ok, leader {self.metric('rlrun_operator_leader'):g}"

        wait_for(state, lambda seen: seen == "ok, leader 1", f"operator {self.name} is ready and leads")

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the elapsed seconds."""
        assert self._process is not None
        began = time.monotonic()
        self._process.terminate()
        code = self.wait_exit()
        return code, time.monotonic() - began

    def wait_exit(self) -> int:
        """Wait until the process ends; return its exit code."""
        assert self._process is not None
        code = wait_for_exit(self._process, progress=lambda: self.log_file.stat().st_size, state=self.log)
        WATCHED.discard(self)
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        WATCHED.discard(self)
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Send SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def http(self, path: str) -> tuple[int, str]:
        """Return status and body of an HTTP answer; status 0 if nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=15) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metrics(self) -> dict[str, float]:
        """Return all samples by name with labels."""
        lines = [line.rsplit(" ", 1) for line in self.http("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def metric(self, name: str) -> float:
        """Return the sum of all samples with this name."""
        pattern = re.compile(rf"{name}(\{{|$)")
        return sum(value for sample, value in self.metrics().items() if pattern.match(sample))

    def writes(self) -> dict[tuple[str, str], int]:
        """Return the number of successful writes by (verb, resource), without the leader Lease and dry runs."""
        found: dict[tuple[str, str], int] = {}
        for sample, value in self.metrics().items():
            if sample.startswith("rlrun_operator_api_requests_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample))
                own = (labels["verb"], labels["resource"]) == ("patch", "leases")
                if labels["verb"] not in ("get", "list", "dry-run") and not own and "subject" not in labels["resource"]:
                    key = (labels["verb"], labels["resource"])
                    found[key] = found.get(key, 0) + int(value)
        return found

    def check_log(self) -> None:
        """Fail if the log has an unexpected error since the last call: one line, or a traceback if nothing caught it."""
        log, self._checked = self.log()[self._checked :], len(self.log())
        assert "Traceback" not in log, log
        assert "unexpected" not in log, log

    def log(self) -> str:
        """Return the whole log."""
        return self.log_file.read_text()
