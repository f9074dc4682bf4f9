"""One start of a container: wait for the role's preconditions, run the role, report why it failed.

The reason of a failure is short and for the operator: it becomes the container's termination message.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run_config import RunConfig
from rlrun.diagnostics import stacks
from rlrun.diagnostics.stacks import describe_end
from rlrun.diagnostics.symptoms import STORAGE_ERROR, Symptom, symptom_of, tag_message
from rlrun.hub.fetch import needs_plain_copy
from rlrun.hub.repository import keep_revisions
from rlrun.mirror.mirror_starter import mirror_beside
from rlrun.pod.container_settings import KEY_VARIABLE, PodSettings, Signals
from rlrun.pod.gpu_metrics import PodMetrics
from rlrun.pod.preparation import claim_when_possible, has_begun, wait_until
from rlrun.pod.rendezvous import PodServer, channel_problem, report_to_first
from rlrun.pod.role_commands import EVERYWHERE, Programs, config_in_pod, role_environment
from rlrun.pod.role_process import Launch, Output, StuckRole, run_process
from rlrun.protocol.files.attempts import check_number
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import ERROR_FILE, RoleError, read_error, volume_is_full
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls
from rlrun.tracking.sink_starter import sink_beside

MAX_BYTES = 2048


def failure_text(
    code: int, *, said: str | None, full: str | None, lines: Sequence[str], symptom: Symptom | None = None
) -> str:
    """Return the message. If it has a meaning for the failure policy, it starts with its tag (`rlrun.diagnostics.symptoms`).

    Args:
        code: exit code; 128 + n for signal n.
        said: message of the role, or None.
        full: folder of the run if its volume is full, because roles then fail in arbitrary ways.
        lines: end of its output.
        symptom: most informative symptom in its output.
    """
    if said is not None:
        known = symptom_of(said)
        return cut_message(tag_message(known.reason if known is not None else None, said))
    head = describe_end(code)
    if full is not None:
        return cut_message(
            tag_message(
                STORAGE_ERROR, f"{head}: the volume of {full} is full (No space left on device); free space on it"
            )
        )
    if not lines:
        return cut_message(f"{head}, without output")
    if symptom is not None:
        head = tag_message(symptom.reason, f"{head}: {symptom}")
    return cut_message("\n".join([f"{head}; its last lines:", *lines]), keep_end=True)


def cut_message(text: str, *, keep_end: bool = False) -> str:
    """Return at most `MAX_BYTES` of UTF-8: the beginning of a longer text, or its first line and its end."""
    text = escape_controls(text, lines=True)
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    if not keep_end:
        return data[: MAX_BYTES - 3].decode(errors="ignore") + "..."
    first, _, rest = text.partition("\n")
    room = MAX_BYTES - len(first.encode()) - 5
    return f"{first}\n..." + rest.encode()[-room:].decode(errors="ignore")


def write_termination_message(path: Path, text: str) -> None:
    """Write the message; outside of a container the file does not exist, and errors are ignored."""
    with suppress(OSError), path.open("w") as file:
        file.write(text)


_PEERS_SECONDS = 2.0
_LOOK_SECONDS = 0.05


class Container:
    """One start of one role.

    Args:
        pod: settings of the container.
        env: environment of the container.
        signals: signals of this process.
        scratch: empty folder of this start, for the process's configuration and its error.
        programs: command lines of its processes.

    Raises:
        RoleError: the configuration is invalid.
    """

    def __init__(
        self, pod: PodSettings, env: Mapping[str, str], signals: Signals, scratch: Path, programs: Programs
    ) -> None:
        self._pod, self._env, self._signals, self._scratch, self._programs = pod, env, signals, scratch, programs
        try:
            self._config = load_file(RunConfig, pod.config)
        except ConfigError as error:
            raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None
        self._paths = RunPaths(Path(self._config.trainer.output_dir))
        self._state = "the pod starts"
        self._engine: Launch | None = None
        """Engine next to the trainer, after it ended and thereby ended the container."""

    def run(self, command: str) -> int:
        """Run `trainer`, `inference`, `orchestrator` or `model` to its end and return the exit code.

        Raises:
            RoleError: the role could not be started.
            StoppedError: a signal arrived before the start.
        """
        role: Role = (
            "inference" if command == "inference" else "orchestrator" if command == "orchestrator" else "trainer"
        )
        self._name = self._pod.pod_name if command != "model" else f"{self._pod.pod_name}-model"
        folder = self._paths.logs(self._pod.attempt, role)
        self._output = Output(folder / f"{self._name}.log")
        # An error file that exists before the role has started belongs to an earlier start.
        had_error_before = (folder / ERROR_FILE).exists()
        try:
            if command == "model":
                code = self._make_model()
            elif command == "trainer":
                code = self._run_trainer()
            else:
                if command == "orchestrator" and not self._has_trainer():
                    self._claim_without_trainer()
                code = self._run_engine() if command == "inference" else self._run_role(role, restart=False)
            if code != exit_codes.OK:
                self._report_failure(code, folder, shared=role != "inference" and not had_error_before)
            return code
        finally:
            self._output.close()

    # ---- the model

    def _has_trainer(self) -> bool:
        """Return whether the run has trainer pods: a guest uses its host's trainer, an evaluation has none."""
        return self._config.trainer.task in TRAINING_TASKS and self._config.orchestrator.shared_with is None

    def _make_model(self) -> int:
        if self._has_trainer() and self._pod.ordinal:
            self._wait_for_model()
            return exit_codes.OK
        self._claim_folder(self._config)
        if self._config.trainer.model.tiny is None or self._model_is_there():
            return exit_codes.OK
        self._output.log_message("creating the tiny model")
        # It connects to no other process. Code of `warmupEnvironment` has run in a container without the key.
        return self._run_command(self._programs.model(self._config_file(restart=False)), "trainer", with_key=False)

    def _make_plain_copy(self) -> int:
        """Write the plain copy of a quantized model before the group starts: torchrun and colocated engines must not wait for hours."""
        command = self._programs.plain_copy
        keep_revisions(self._paths)
        if command is None or self._model_is_there() or not needs_plain_copy(self._config.trainer.model):
            return exit_codes.OK
        self._state = "the copy of the quantized model is being written"
        self._output.log_message("writing a copy of the quantized model without quantization")
        return self._run_command(command(self._config_file(restart=False)), "trainer", with_key=False)

    def _wait_for_model(self) -> None:
        """Wait for the tiny model's folder, which appears only when it is complete."""
        if self._config.trainer.model.tiny is not None:
            wait_until(
                lambda: None if self._model_is_there() else f"{self._paths.model} does not exist yet",
                what="the tiny model, which "
                + ("the trainer's first pod creates" if self._has_trainer() else "the orchestrator's pod creates"),
                say=self._output.log_message,
                signals=self._signals,
            )

    def _model_is_there(self) -> bool:
        try:
            # List the folder: a network file system answers a lookup of one name from a cache for a while.
            return self._paths.model.name in os.listdir(self._paths.root)  # noqa: PTH208
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RoleError(f"cannot read {self._paths.root}: {error.strerror}", exit_codes.STORAGE) from error

    def _claim_folder(self, config: RunConfig) -> None:
        claim_when_possible(self._paths, config, self._pod.attempt, say=self._output.log_message, signals=self._signals)

    # ---- the orchestrator

    def _is_restart(self) -> bool:
        """Return whether earlier attempts override `checkpoint.resume`; not with policy Latest, so that their damaged files do no harm."""
        trainer = self._config.trainer
        return trainer.checkpoint.resume.policy != "Latest" and has_begun(self._paths, trainer.uid)

    def _claim_without_trainer(self) -> None:
        """Claim the folder of a run without trainer pods. For a guest, the host's trainer reads its `run.json` when it requests a slot."""
        restart = self._is_restart()
        self._claim_folder(config_in_pod(self._config, restart=restart, pod_ip=self._pod.pod_ip))
        check_number(self._paths, self._pod.attempt)

    # ---- the engine

    def _run_engine(self) -> int:
        """Run the engine. If the port for the pod's metrics is in use, the pod runs without metrics."""
        # Fails if the image's engine does not fit the pod.
        self._programs.role("inference", self._pod, self._config, self._pod.config)
        self._wait_for_model()
        metrics = PodMetrics()
        server = None
        try:
            server = self._pod_server(metrics, lambda: None)
        except RoleError as error:
            self._output.log_message(f"this pod has no metrics: {error}")
        try:
            return self._run_role("inference", restart=False)
        finally:
            metrics.close()
            if server is not None:
                server.close()

    # ---- the trainer

    def _pod_server(self, metrics: PodMetrics, look: Callable[[], str | None]) -> PodServer:
        pod = self._pod
        return PodServer(
            pod.pod_ip or EVERYWHERE, attempt=pod.attempt, api_key=pod.api_key, look=look, metrics=metrics.text
        )

    def _run_trainer(self) -> int:
        pod = self._pod
        metrics = PodMetrics()
        server = self._pod_server(metrics, self._why_not_ready)
        try:
            restart = False
            self._programs.role("trainer", pod, self._config, pod.config)  # fails for a pod outside of the group
            if pod.ordinal == 0:
                self._state = "the run's volume refuses writes"
                self._claim_folder(self._config)
                check_number(self._paths, pod.attempt)
                restart = self._is_restart()
                if code := self._make_plain_copy():
                    return code
                self._wait_for_all(server)
            else:
                self._wait_for_first()
            return self._run_role("trainer", restart=restart)
        finally:
            self._state = "the trainer's process has ended"
            server.close()
            metrics.close()

    def _wait_for_all(self, server: PodServer) -> None:
        self._state = "not all pods of the trainer are up"
        wait_until(
            lambda: server.missing_pods(self._pod.nodes) or self._name_problem(),
            what="the other pods of the trainer" if self._pod.nodes > 1 else "this pod's name in the DNS",
            say=self._output.log_message,
            signals=self._signals,
        )
        server.go.set()

    def _name_problem(self) -> str | None:
        """Return why this pod's own name is not resolvable yet: torchrun needs it."""
        try:
            socket.getaddrinfo(self._pod.master_addr, self._pod.master_port)
        except OSError as error:
            return f"{self._pod.master_addr}: {error.strerror}"
        return None

    def _wait_for_first(self) -> None:
        self._state = "the trainer's first pod has not started the group"
        pod = self._pod
        wait_until(
            lambda: report_to_first(pod.master_addr, ordinal=pod.ordinal, attempt=pod.attempt, api_key=pod.api_key),
            what="the trainer's first pod",
            say=self._output.log_message,
            signals=self._signals,
        )

    def _why_not_ready(self) -> str | None:
        """Return why the probe fails. Only the first pod can check whether the attempt has started; the others only need to run."""
        if self._state:
            return self._state
        return channel_problem(self._config.trainer.port) if self._pod.ordinal == 0 else None

    # ---- any role

    def _config_file(self, *, restart: bool) -> Path:
        file = self._scratch / "run.json"
        document = config_in_pod(self._config, restart=restart, pod_ip=self._pod.pod_ip).model_dump_json(
            indent=1, by_alias=False
        )
        write_bytes(file, document.encode())
        return file

    def _run_role(self, role: Role, *, restart: bool) -> int:
        file = self._config_file(restart=restart)
        command = self._programs.role(role, self._pod, self._config, file)
        self._state = ""
        if role == "trainer" and self._config.trainer.colocated:
            engine = self._programs.role("inference", self._pod, self._config, file)
            return self._run_command(command, role, engine=engine)
        if role != "orchestrator":
            return self._run_command(command, role)
        environ = {name: value for name, value in self._env.items() if name != KEY_VARIABLE}
        say, should_hurry = self._output.log_message, self._is_stopping
        with (
            mirror_beside(self._config, file, environ, say=say, hurry=should_hurry),
            sink_beside(self._config, file, environ, say=say, hurry=should_hurry),
        ):
            return self._run_command(command, role)

    def _is_stopping(self) -> bool:
        return self._signals.received is not None

    def _run_command(
        self, command: list[str], role: Role, *, engine: list[str] | None = None, with_key: bool = True
    ) -> int:
        sys.stdout.flush()
        file = self._scratch / "stacks"
        env = role_environment(role, self._pod, self._env, self._scratch) | {stacks.FILE_VARIABLE: str(file)}
        if not with_key:
            del env[KEY_VARIABLE]
        after = stacks.seconds_until_stacks(self._config.trainer.checkpoint.grace_period_seconds)
        keep = self._paths.logs(self._pod.attempt, role) / f"{self._name}{stacks.SUFFIX}"
        with StuckRole(self._signals, after=after, file=file, keep=keep, output=self._output):
            main = Launch(command, env, self._output)
            if engine is None:
                return run_process(main, signals=self._signals)[0]
            return self._run_with_engine(main, engine, {stacks.FILE_VARIABLE: str(file)})

    def _run_with_engine(self, main: Launch, command: list[str], more: Mapping[str, str]) -> int:
        """Run the trainer with an engine on the same GPUs: they use them alternately, and end together."""
        self._engine_scratch.mkdir()
        env = role_environment("inference", self._pod, self._env, self._engine_scratch)
        output = Output(self._paths.logs(self._pod.attempt, "inference") / f"{self._name}.log")
        engine = Launch(command, {**env, **more}, output)
        try:
            code, ended = run_process(main, engine, signals=self._signals)
        finally:
            output.close()
        if ended is main:
            return code
        self._engine = engine
        return code or exit_codes.FAILURE  # an engine that ended without a request has failed, with any exit code

    @property
    def _engine_scratch(self) -> Path:
        return self._scratch / "inference"

    def _report_failure(self, code: int, folder: Path, *, shared: bool) -> None:
        """Write the termination message.

        Args:
            code: exit code.
            folder: log folder of the role, shared by all its pods of this attempt.
            shared: whether `error.json` there belongs to this start: it then has the role's first cause, perhaps another pod's.
        """
        if self._signals.received is not None:
            return  # a requested stop is not a failure
        if self._engine is None:
            output, error = self._output, (_first_error(folder) if shared else None) or read_error(self._scratch)
        else:
            output, error = self._engine.output, read_error(self._engine_scratch)
            error = None if error is None else RoleError(f"the engine in the trainer's pod: {error}", error.code)
        full = str(self._paths.root) if volume_is_full(self._paths.root) else None
        text = failure_text(
            code,
            said=None if error is None else str(error),
            full=full,
            lines=output.last_lines(),
            symptom=symptom_of(output.end_text()),
        )
        write_termination_message(self._pod.termination_log, text)


def _first_error(folder: Path) -> RoleError | None:
    """Return the role's error. If it only follows from another pod's end, wait shortly: that pod may be about to write the cause."""
    deadline = time.monotonic() + _PEERS_SECONDS
    while (error := read_error(folder)) is not None and error.follows and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return error
