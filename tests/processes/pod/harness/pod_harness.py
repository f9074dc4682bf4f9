"""Container without Kubernetes: the operator's environment, and a role with the code of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, cast

import rlrun
from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.messages.endpoints import POD_PORT, POD_READY
from rlrun.runtime.processes import LAUNCH_VARIABLE
from tests.support.program_forks import CODE, program_forks
from tests.support.programs import finish

STUB_POD = Path(__file__).parents[4] / "tests/support/stub/rlrun-pod"
"""`rlrun-pod` of the stub image."""
IMPORT_PATH = f"{Path(__file__).parents[4]}:{Path(rlrun.__file__).parents[1]}"
"""Import path of the stubs and the package."""
PATIENT = "TEST_PATIENT"
"""Environment variable: the pod waits a minute for messages of its processes and peers, because the machine may be busy."""
_DRIVER = """
import os, sys
from rlrun.pod.pod_command import main

if os.environ.pop("TEST_PATIENT", None):
    from rlrun.diagnostics import stacks
    from rlrun.pod import container
    stacks.ANSWER_SECONDS = stacks.ALL_SECONDS = container._PEERS_SECONDS = 60.0

def programs():
    from rlrun.pod.role_commands import Programs
    command = lambda *_: [sys.executable, "-c", ROLE]
    return Programs(command, command, lambda *_: [sys.executable, "-c", COPY])

sys.exit(main([COMMAND], programs=programs))
"""


def run_config(root: Path, *, uid: str = "uid-1", **spec: Any) -> RunConfig:
    document = {"model": {"path": "m"}, "seqLen": 512, "environments": [{"id": "arithmetic"}], **spec}
    return resolve_spec(RLRunSpec.model_validate(document), name="demo", uid=uid, output_dir=str(root))


class Pod:
    """A pod with one container, which can be started several times."""

    def __init__(self, tmp_path: Path, name: str, config: RunConfig, ip: str, master: str) -> None:
        self.root, self.name, self.ip = Path(config.trainer.output_dir), name, ip
        self.mark = uuid.uuid4().hex
        self.folder = tmp_path / f"{name}.{self.mark}"
        self.folder.mkdir()
        self.message_file = self.folder / "termination-log"
        self.message_file.write_text("")
        (self.folder / "run.json").write_text(config.model_dump_json(by_alias=False))
        self.env = {
            **os.environ,
            LAUNCH_VARIABLE: self.mark,
            "RLRUN_CONFIG": str(self.folder / "run.json"),
            "RLRUN_ATTEMPT": "1",
            "RLRUN_API_KEY": "the-run's-key",
            "RLRUN_POD_NAME": name,
            "RLRUN_POD_IP": ip,
            "RLRUN_POD_STATE": str(self.folder / "state"),
            "RLRUN_TERMINATION_LOG": str(self.message_file),
            "RLRUN_NNODES": str(config.trainer.replicas),
            "RLRUN_MASTER_ADDR": master,
            "RLRUN_MASTER_PORT": str(free_port()),
        }
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: str, role: str = "", copy: str = "", **env: str) -> subprocess.Popen[str]:
        """Start the container as a forked process; `role` and `copy` are the code of the role and of the plain copy."""
        code = f"COMMAND, ROLE, COPY = {command!r}, {textwrap.dedent(role)!r}, {textwrap.dedent(copy)!r}\n{_DRIVER}"
        process = cast("subprocess.Popen[str]", program_forks().open(CODE, code, environment=self.env | env))
        self.running.append(process)  # A forked program has the same methods.
        return process

    def start_command(self, command: list[str], **env: str) -> subprocess.Popen[str]:
        """Start the container with this command."""
        return self._start(command, env)

    def start_stub(self, command: str, **env: str) -> subprocess.Popen[str]:
        """Start the container as the stub image does."""
        return self._start([sys.executable, str(STUB_POD), command], {"PYTHONPATH": IMPORT_PATH, **env})

    def run(self, command: str, role: str = "", copy: str = "", **env: str) -> tuple[int, str, str]:
        """Run the container once; return exit code, stdout and stderr."""
        return _end(self.start(command, role, copy, **env))

    def run_stub(self, command: str, **env: str) -> tuple[int, str, str]:
        """Run the container once with the stub image's role."""
        return _end(self.start_stub(command, **env))

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    @property
    def message(self) -> str:
        """Termination message."""
        return self.message_file.read_text()

    def log(self, role: str, attempt: int = 1, suffix: str = "") -> str:
        """Return the log on the volume."""
        file = self.root / "logs" / f"attempt_{attempt:04d}" / role / f"{self.name}{suffix}.log"
        return file.read_text() if file.exists() else ""

    def ready(self) -> tuple[int, str | None]:
        """Return the result of the probe: the status (0 without a listener) and the reason."""
        try:
            with urllib.request.urlopen(f"http://{self.ip}:{POD_PORT}{POD_READY}", timeout=5) as response:
                return response.status, json.load(response)["reason"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["reason"]
        except OSError:
            return 0, None


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = finish(process)
    return process.returncode, out, err
