"""One call of `rlrun local`: parameters, configurations, ports and GPUs, record, and the main loop.

The main loop starts, watches and stops the run's processes. The record contains the progress of the run and how it ended.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run_config import RunConfig
from rlrun.local import shared_processes
from rlrun.local.gpus import Claim, GpuMeter, claim_gpus
from rlrun.local.preflight import (
    PreflightError,
    check_engine,
    check_folder,
    check_ports,
    choose_ports,
    refuse_options_of_the_host,
)
from rlrun.local.process_plan import Ports, RoleProcess, with_endpoints
from rlrun.local.shared_processes import (
    Endpoints,
    endpoints_of,
    join_host,
    offer_trainer,
    shares_trainer,
    withdraw_offer,
)
from rlrun.local.summary import Farewell, print_measures, print_summary
from rlrun.local.supervisor import STOP_SECONDS, Running, Supervisor, exit_code_of, explain_failure, first_cause
from rlrun.local.user_code import code_of_folder
from rlrun.local.view import View, show_duration
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.identity import read_identity
from rlrun.protocol.files.launcher_record import BEAT_SECONDS, State, new_record, write_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.protocol.files.run_folder import check_same_run, recorded_run
from rlrun.protocol.files.shared_trainer_files import host_paths
from rlrun.runtime import exit_codes
from rlrun.tracking.sink_starter import SinkProcess, log_file


class Recorder:
    """Writer of one attempt's `launcher.json`.

    Args:
        path: path of the file.
        name: name of the run.
        attempt: number of the attempt.
        command: command that continues the run.
        gpus: number of GPUs of each role.
        use: function that returns the current usage of each role's GPUs.
        clock: function that returns seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        attempt: int,
        command: str,
        gpus: Mapping[str, int] | None = None,
        use: Callable[[], Mapping[str, object]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock, self._use = path, clock, use
        self._record = new_record(name, attempt, command, gpus)
        self._written = 0.0

    def record_progress(self, progress: Mapping[str, object] | None) -> None:
        """Record the current progress, and write it at most every two seconds. None: the orchestrator does not answer."""
        now = self._clock()
        if progress:
            self._record = replace(self._record, progress=progress, progress_time=now)
        if now - self._written >= BEAT_SECONDS:
            self._write_record(now)

    def record_end(self, state: State, failed: Running | None = None) -> None:
        """Write the final state of the attempt."""
        role, code = (failed.spec.name, failed.process.returncode) if failed is not None else (None, None)
        self._record = replace(self._record, state=state, failed_role=role, exit_code=code)
        self._write_record(self._clock())

    def _write_record(self, now: float) -> None:
        self._record = replace(self._record, time=now, gpu_use=self._use())
        write_record(self._path, self._record)
        self._written = now


@dataclass(frozen=True)
class Call:
    """Parameters and output of one call."""

    spec: RLRunSpec
    name: str
    paths: RunPaths
    options: argparse.Namespace
    console: Console
    command: str
    """Command of the user, without the folder."""
    interrupted: list[int]
    """Received signals."""
    begun: list[Path] = field(default_factory=list)
    """Written configuration files; not empty as soon as the folder contains a run."""

    @property
    def trains(self) -> bool:
        """Whether the run trains; False for an evaluation."""
        return self.spec.task in TRAINING_TASKS

    @property
    def resume_command(self) -> str:
        """Command that continues the run."""
        return f"{self.command} --output-dir {shlex.quote(self.folder)} --resume"

    def farewell_lines(self, *, failed: bool) -> list[str]:
        """Return the last lines of a stopped run: its checkpoint, its folders, and how to continue."""
        farewell = Farewell(
            self.paths, shlex.quote(self.folder), self.resume_command, trains=self.trains, failed=failed
        )
        return list(farewell.lines())

    def make_recorder(self, attempt: int, gpus: Claim, held: ExitStack) -> Recorder:
        """Return the writer of the launcher's record. It samples the use of the GPUs until `held` is closed."""
        roles = {"trainer": gpus.trainer, "inference": [one for one in gpus.inference if one not in gpus.trainer]}
        held.callback((meter := GpuMeter(roles)).close)
        return Recorder(
            self.paths.launcher,
            name=self.name,
            attempt=attempt,
            command=self.resume_command,
            gpus={role: len(ids) for role, ids in roles.items()},
            use=meter.document,
        )

    @property
    def folder(self) -> str:
        """Folder of the run, relative to the working directory if possible."""
        root, here = self.paths.root, Path.cwd()
        return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)

    def print_text(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def without_folder(words: Sequence[str]) -> list[str]:
    """Remove the options that `Call.resume_command` adds from a command line: the run's folder and how to continue."""
    kept: list[str] = []
    skips = False
    for word in words:
        if skips or word in ("--resume", "--take-over") or word.startswith("--output-dir="):
            skips = False
        elif word == "--output-dir":
            skips = True
        else:
            kept.append(word)
    return kept


def conclude_run(call: Call, failed: Running | None, *, elapsed_seconds: float) -> int:
    """Print how the run ended and how to continue it. Returns the exit code."""
    if call.interrupted:
        return farewell_of_signal(call)
    if failed:
        print("\n".join(["everything is stopped", *call.farewell_lines(failed=True)]), file=sys.stderr)
        return exit_code_of(failed, call.paths.root)
    if call.trains:
        print_summary(call.console, call.paths.root, elapsed_seconds=elapsed_seconds, command=call.command)
    else:
        print_measures(call.console, call.paths.root)
    return exit_codes.OK


def farewell_of_signal(call: Call) -> int:
    """Print the state of a run that a signal has ended. Returns the exit code."""
    name = (
        f" by {signal.Signals(call.interrupted[0]).name}" if call.interrupted[:1] not in ([], [signal.SIGINT]) else ""
    )
    if not call.begun:
        call.print_text(f"interrupted{name}: nothing was started")
    else:
        call.print_text("\n".join([f"interrupted{name}: everything is stopped", *call.farewell_lines(failed=False)]))
    return exit_codes.INTERRUPTED


@dataclass(frozen=True)
class Place:
    """Ports, GPUs and key of a run's processes on this machine."""

    ports: Ports
    host: Endpoints | None
    """Endpoints of the host run whose trainer and engines this run uses. None: the run has its own."""
    api_key: str
    gpus: Claim


def resolve_config(call: Call) -> RunConfig:
    """Return the run's configuration, without engines if it trains only on recorded batches."""
    uid = _new_uid(call.paths, call.options.resume or bool(call.options.engine_url))
    config = resolve_spec(call.spec, name=call.name, uid=uid, output_dir=str(call.paths.root))
    if call.options.replay and config.orchestrator.evaluation is None:
        return config.model_copy(update={"inference": None})  # nothing is sampled, so no engine is started
    return config


def find_place(call: Call, config: RunConfig, held: ExitStack) -> Place:
    """Choose ports and GPUs.

    Raises:
        PreflightError: the machine does not have the required hardware or software, or an option does not fit the run.
    """
    options, host = call.options, config.trainer.shared_with
    if config.inference is not None and host is None and not options.engine_url:
        check_engine(config.inference.gpus_per_replica)
    if host is not None:
        refuse_options_of_the_host(options, host)
    api_key = (
        shared_processes.check_engines(options, config, call.paths) if options.engine_url else secrets.token_urlsafe(32)
    )
    ports = choose_ports(options, config)
    check_ports(ports)
    if host is not None:
        return Place(ports, endpoints_of(call.paths.root, host), api_key, Claim())
    own = config.model_copy(update={"inference": None}) if options.engine_url else config
    gpus = claim_gpus(own, options.trainer_gpu_ids, options.inference_gpu_ids, share=options.share_gpus)
    return Place(ports, None, api_key, held.enter_context(gpus))


def check_replay(call: Call) -> None:
    """Reject `--replay` for other tasks than RL, and for a missing folder."""
    replay, task = call.options.replay, call.spec.task
    if replay and task != "RL":
        why = (
            "supervised fine-tuning creates the same batches from its data"
            if task == "SFT"
            else "this task does not train"
        )
        raise PreflightError(f"--replay works only for task RL: {why}; remove it")
    if replay and not Path(replay).is_dir():
        raise PreflightError(f"--replay: no folder {replay}")


def check_recorded(call: Call, config: RunConfig) -> None:
    """Reject a folder that is not empty or contains another run, and code that only the folder selects.

    Raises:
        RoleError: contains the folder or the code, and the fix.
    """
    options = call.options
    check_folder(call.paths.root, resume=options.resume, engines=bool(options.engine_url), take_over=options.take_over)
    before = recorded_run(call.paths) if call.options.resume else None
    if before is not None:
        check_same_run(before, config.trainer, remedy="choose another --output-dir to start a new run")
    host = config.trainer.shared_with
    for paths in (call.paths, *(() if host is None else (host_paths(call.paths.root, host),))):
        check_recorded_code(
            paths.root, list(code_of_folder(config.trainer.model, paths)), trusted=options.trust_recorded_code
        )


def with_place(call: Call, config: RunConfig, place: Place) -> list[RunConfig]:
    """Return one configuration per engine, which differ in their ports, or one if the run starts no engine."""
    replay = str(Path(call.options.replay).absolute()) if call.options.replay else None
    configs = with_endpoints(config, place.ports, replay, running=call.options.engine_url or ())
    return configs if place.host is None else [join_host(one, place.host) for one in configs]


def write_configs(paths: RunPaths, configs: Sequence[RunConfig]) -> list[Path]:
    """Write the configurations to the run's folder. The first file is its `run.json`."""
    files = [paths.run_json if i == 0 else paths.run_json.with_stem(f"run.{i}") for i in range(len(configs))]
    for file, document in zip(files, configs, strict=True):
        write_bytes(file, (document.model_dump_json(indent=1, by_alias=False) + "\n").encode())
    return files


def _new_uid(paths: RunPaths, known: bool) -> str:
    before = read_identity(paths) if known else None
    return str(uuid.uuid4()) if before is None else before[1]


_POLL_SECONDS = 0.25


def play_run(
    call: Call,
    config: RunConfig,
    supervisor: Supervisor,
    sink: SinkProcess | None,
    specs: list[RoleProcess],
    place: Place,
    recorder: Recorder,
) -> Running | None:
    """Start the processes, show the run, and stop the processes at its end.

    Returns:
        Process that failed, or None if the run is complete or a signal arrived.
    """
    shared = shares_trainer(config)
    try:
        supervisor.start(specs)
        if shared:
            offer_trainer(call.paths, place.ports)
        view = View(
            call.console, name=call.name, max_steps=call.spec.max_steps if call.trains else None,
            metrics=call.paths.metrics, url=f"http://127.0.0.1:{place.ports.metrics}", api_key=place.api_key,
            plain=call.options.plain or not call.console.is_terminal,
        )  # fmt: skip
        with view:
            failed = _watch_run(supervisor, view, call.interrupted, sink, recorder, shared=shared)
            view.update("")
        if failed:
            explain_failure(failed, call.paths.root)
            print("stopping the other processes", file=sys.stderr)
        return failed
    finally:
        # The order matters: first no other run joins, then the roles save and end, and last the trackers get the remaining records.
        withdraw_offer(call.paths)
        asked = len(call.interrupted)
        if call.interrupted:
            kept = "the last trained step is being saved" if call.trains else "finished answers are saved"
            call.print_text(
                f"\nstopping: {kept} (press Ctrl-C again to stop immediately without saving)"
                if call.trains
                else f"\nstopping: {kept}"
            )
        supervisor.stop(
            config.trainer.checkpoint.grace_period_seconds + STOP_SECONDS, hurry=lambda: len(call.interrupted) > asked
        )
        if sink is not None:
            _end_tracking(call, sink, hurry=lambda: len(call.interrupted) > asked)


def _end_tracking(call: Call, sink: SinkProcess, *, hurry: Callable[[], bool]) -> None:
    """Send the remaining records to the trackers, or print how to send them later."""
    if not sink.stop(hurry=hurry):
        log = log_file(Path(call.folder))
        call.print_text(
            f"some records have not reached the trackers, see {log}; send them with `rlrun track {shlex.quote(call.folder)}`"
        )


def _watch_run(
    supervisor: Supervisor,
    view: View,
    interrupted: list[int],
    sink: SinkProcess | None,
    recorder: Recorder,
    *,
    shared: bool,
) -> Running | None:
    """Watch the run. Returns None after the orchestrator has finished or a signal arrived, or the first role that failed.

    A trainer that other runs share ends after the last of them has left it.
    """
    began = time.monotonic()
    while not interrupted:
        if sink is not None:
            sink.keep_running()
        ended = supervisor.poll_exited()
        done = {r.spec.role for r in ended if r.process.returncode == 0} - {"inference"}
        if done >= ({"orchestrator", "trainer"} if shared else {"orchestrator"}):
            return None
        # The orchestrator may stop the trainer, which then ends with 0 first. An engine must never end before the run.
        failed = [r for r in ended if r.process.returncode != 0 or r.spec.role == "inference"]
        if failed:
            return first_cause(failed)
        view.update(f"the roles to start since {show_duration(time.monotonic() - began)}")
        recorder.record_progress(view.progress)
        time.sleep(_POLL_SECONDS)
    return None
