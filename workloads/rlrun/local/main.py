"""`rlrun local run.yaml`: start all roles, show the run, end everything; exit code 0 only for a complete run."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from rlrun.api.manifest import manifest_text
from rlrun.api.resolve import resolve
from rlrun.api.resource import RLRunSpec
from rlrun.api.variation import Variation, field_options, take_variation
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser, own_options, whole, wholes
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run import RunConfig
from rlrun.local.failure import exit_code, explain, first_cause
from rlrun.local.farewell import Farewell
from rlrun.local.inputs import read_of
from rlrun.local.judge import judge_manifest, stopped
from rlrun.local.measures import print_measures
from rlrun.local.model import prepare_model
from rlrun.local.plan import Ports, RoleProcess, processes, with_endpoints
from rlrun.local.preflight import (
    PreflightError,
    check_engine,
    check_folder,
    check_packages,
    check_ports,
    check_trackers,
    choose_ports,
    refuse_options_of_the_host,
)
from rlrun.local.record import Recorder
from rlrun.local.shared import running_engines
from rlrun.local.shared.gpu_meter import GpuMeter
from rlrun.local.shared.gpus import Claim, claimed, gpu_ids
from rlrun.local.shared.sharing import Endpoints, endpoints_of, joined, offer, shares, withdraw
from rlrun.local.summary import print_summary
from rlrun.local.supervisor import STOP_SECONDS, Running, Supervisor
from rlrun.local.view import View, duration
from rlrun.mirror.starter import mirror_beside
from rlrun.protocol.files.attempts import next_number
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import read_identity
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_same_run, keep_config, recorded_run
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.options import full_names
from rlrun.tracking.starter import SinkProcess, log_file

_POLL_SECONDS = 0.25
_MAX_PORT = 65_535


def parser() -> Parser:
    """The command line of `rlrun local`."""
    p = Parser(
        "rlrun local",
        "Run all roles of a run on this machine. Fields of spec are options too, behind the manifest; "
        "--wandb, --wandb.project NAME, --tensorboard and their like turn trackers on.",
    )
    p.add_argument("manifest", help="an RLRun manifest")
    add_options(p)
    return p


def add_options(p: argparse.ArgumentParser) -> None:
    """The options that `rlrun local` and `rl` share."""
    p.add_argument("--output-dir", help="the run's folder (default: runs/<name>)")
    p.add_argument(
        "--resume", action="store_true", help="go on with the run in the folder, from its last complete checkpoint"
    )
    p.add_argument(
        "--replay", metavar="DIR", help="train on recorded batches (rollouts/ of another run) instead of new ones"
    )
    p.add_argument(
        "--inference-port",
        type=wholes(1, _MAX_PORT, such_as="8000,8001"),
        help="port of the engine, or one per replica: 8000,8001 (default: free ones)",
    )
    p.add_argument(
        "--trainer-port", type=whole(1, _MAX_PORT), help="port of the trainer's channel (default: a free one)"
    )
    p.add_argument(
        "--metrics-port", type=whole(1, _MAX_PORT), help="port of the orchestrator's metrics (default: a free one)"
    )
    p.add_argument("--trainer-gpu-ids", type=gpu_ids, help="GPUs of the trainer, by index or UUID, such as 2,3")
    p.add_argument("--inference-gpu-ids", type=gpu_ids, help="GPUs of the engines, such as 0,1")
    p.add_argument("--share-gpus", action="store_true", help="use GPUs that other runs of this machine use, too")
    running_engines.add_option(p)
    p.add_argument("--plain", action="store_true", help="print a line per step instead of the live view")


def main(argv: Sequence[str]) -> int:
    """Run `rlrun local`; returns the exit code."""
    return not_yet(lambda: _main(argv))


def not_yet(start: Callable[[], int]) -> int:
    """Exit code of `start`, which handles signals itself once it has started something."""
    try:
        return start()
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was started", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _main(argv: Sequence[str]) -> int:
    rest, varied = take_variation(full_names(argv), own_options(p := parser()))
    p.also = field_options()
    options = p.parse_args(rest)
    console = Console(stderr=False)
    try:
        check_packages((*extras.TRAINING, *extras.SAMPLING))
        text = read_text(Path(options.manifest))
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    judged = judge_manifest(text, options.manifest, here=True, variation=Variation(varied, os.environ))
    code = stopped(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    run = judged.run
    return run_spec(
        run.spec,
        name=run.metadata.name,
        options=options,
        console=console,
        command=shlex.join(["rlrun", "local", options.manifest, *varied]),
    )


def run_spec(spec: RLRunSpec, *, name: str, options: argparse.Namespace, console: Console, command: str) -> int:
    """Run a specification to its end.

    Args:
        spec: what to run; `judge` has found no problem in it.
        name: the run's name.
        options: as `add_options` defines them.
        console: where the view is drawn.
        command: what the user called, without the folder; for messages.
    """
    root = Path(options.output_dir or Path("runs") / name).absolute()
    interrupted: list[int] = []
    call = _Call(spec, name, RunPaths(root), options, console, command, interrupted)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        interrupted.append(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with ExitStack() as held:
            return _run(call, held)
    except KeyboardInterrupt:
        return _farewell_of_signal(call)
    except RoleError as error:
        print("\n".join([f"error: {error}", *(call.farewell(failed=True) if call.begun else ())]), file=sys.stderr)
        return error.code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    except OSError as error:
        print(f"error: {error.filename or root}: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Call:
    """One call: what it runs, and how it talks to its user."""

    spec: RLRunSpec
    name: str
    paths: RunPaths
    options: argparse.Namespace
    console: Console
    command: str
    """Command of the user, without the folder."""
    interrupted: list[int]
    """Signals so far."""
    begun: list[Path] = field(default_factory=list)
    """Files of its configuration, as soon as they are in the folder."""

    @property
    def trains(self) -> bool:
        """False if the run evaluates alone."""
        return self.spec.task in TRAINING_TASKS

    @property
    def again(self) -> str:
        """Command that goes on with the run."""
        return f"{self.command} --output-dir {shlex.quote(self.folder)} --resume"

    def farewell(self, *, failed: bool) -> list[str]:
        """Lines on the last checkpoint, the places of things, and the way to go on."""
        told = Farewell(self.paths, shlex.quote(self.folder), self.again, trains=self.trains, failed=failed)
        return list(told.lines())

    def recorder(self, attempt: int, gpus: Claim, held: ExitStack) -> Recorder:
        """Writer of the attempt's launcher record, with the use of its GPUs until `held` lets them go."""
        roles = {"trainer": gpus.trainer, "inference": [one for one in gpus.inference if one not in gpus.trainer]}
        held.callback((meter := GpuMeter(roles)).close)
        return Recorder(
            self.paths.launcher,
            name=self.name,
            attempt=attempt,
            command=self.again,
            gpus={role: len(ids) for role, ids in roles.items()},
            use=meter.document,
        )

    @property
    def folder(self) -> str:
        """The run's folder as short as it can be typed from here."""
        root, here = self.paths.root, Path.cwd()
        return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class _Place:
    """Place of a run's processes on this machine."""

    ports: Ports
    host: Endpoints | None
    """Endpoints of the run whose trainer and engines this run uses; None: it has its own."""
    api_key: str
    gpus: Claim


def _run(call: _Call, held: ExitStack) -> int:
    """Run to the end; what is claimed on the way is let go with `held`."""
    began = time.monotonic()
    config = _resolve(call)
    check_trackers(call.spec.tracking, os.environ)
    place = _find_place(call, config, held)
    _check_replay(call)
    _check_folder(call, config)
    configs = _with_place(call, config, place)
    call.begun.extend(files := _write(call.paths, configs))
    write_bytes(call.paths.manifest, manifest_text(call.spec, call.name).encode())
    attempt = next_number(call.paths)
    keep_config(call.paths, attempt, files[0].read_bytes())
    if place.host is None:
        prepare_model(config, files[0], call.paths, attempt, call.say, lambda: bool(call.interrupted))
    if call.interrupted:
        raise KeyboardInterrupt
    launch_id = uuid.uuid4().hex
    specs = processes(
        configs, files, attempt=attempt, api_key=place.api_key, launch_id=launch_id, ports=place.ports,
        trainer_gpus=place.gpus.trainer, inference_gpus=place.gpus.inference,
    )  # fmt: skip
    if call.options.engine_url:
        specs = [spec for spec in specs if spec.role != "inference"]
    call.say(
        f"run {call.name}, attempt {attempt}; folder {call.folder}, logs in {call.folder}/logs/attempt_{attempt:04d}"
    )
    for line in (*read_of(config), f"starting {', '.join(spec.name for spec in specs)}"):
        call.say(line)
    supervisor = Supervisor(launch_id, place.gpus.descriptors)
    sink = SinkProcess(files[0], call.paths.root, os.environ) if enabled_trackers(config.tracking, os.environ) else None
    recorder = call.recorder(attempt, place.gpus, held)
    with mirror_beside(config, files[0], os.environ, say=call.say, hurry=lambda: bool(call.interrupted)):
        failed = _play(call, config, supervisor, sink, specs, place, recorder)
        recorder.end("Interrupted" if call.interrupted else "Failed" if failed else "Complete", failed)
    return _conclude(call, failed, elapsed_seconds=time.monotonic() - began)


def _resolve(call: _Call) -> RunConfig:
    uid = _uid(call.paths, call.options.resume or bool(call.options.engine_url))
    config = resolve(call.spec, name=call.name, uid=uid, output_dir=str(call.paths.root))
    if call.options.replay and config.orchestrator.evaluation is None:
        return config.model_copy(update={"inference": None})  # nothing is sampled, so no engine is started
    return config


def _find_place(call: _Call, config: RunConfig, held: ExitStack) -> _Place:
    """Choose ports and GPUs.

    Raises:
        PreflightError: the machine has not what the run needs, or an option is none for it.
    """
    options, host = call.options, config.trainer.shared_with
    if config.inference is not None and host is None and not options.engine_url:
        check_engine(config.inference.gpus_per_replica)
    if host is not None:
        refuse_options_of_the_host(options, host)
    api_key = running_engines.check(options, config, call.paths) if options.engine_url else secrets.token_urlsafe(32)
    ports = choose_ports(options, config)
    check_ports(ports)
    if host is not None:
        return _Place(ports, endpoints_of(call.paths.root, host), api_key, Claim())
    own = config.model_copy(update={"inference": None}) if options.engine_url else config
    gpus = claimed(own, options.trainer_gpu_ids, options.inference_gpu_ids, share=options.share_gpus)
    return _Place(ports, None, api_key, held.enter_context(gpus))


def _check_replay(call: _Call) -> None:
    replay, task = call.options.replay, call.spec.task
    if replay and task != "RL":
        why = "supervised fine-tuning makes the same batches from its data again"
        raise PreflightError(f"--replay is for task RL: {why if task == 'SFT' else 'nothing is trained'}")
    if replay and not Path(replay).is_dir():
        raise PreflightError(f"--replay: there is no folder {replay}")


def _check_folder(call: _Call, config: RunConfig) -> None:
    check_folder(call.paths.root, resume=call.options.resume, engines=bool(call.options.engine_url))
    before = recorded_run(call.paths) if call.options.resume else None
    if before is not None:
        check_same_run(before, config.trainer, remedy="choose another --output-dir to start a new run")


def _with_place(call: _Call, config: RunConfig, place: _Place) -> list[RunConfig]:
    """One configuration per engine, which differ in its port; one where the run starts no engine."""
    replay = str(Path(call.options.replay).absolute()) if call.options.replay else None
    configs = with_endpoints(config, place.ports, replay, running=call.options.engine_url or ())
    return configs if place.host is None else [joined(one, place.host) for one in configs]


def _write(paths: RunPaths, configs: Sequence[RunConfig]) -> list[Path]:
    """Write the configurations into the run's folder; the first is its `run.json`."""
    files = [paths.run_json if i == 0 else paths.run_json.with_stem(f"run.{i}") for i in range(len(configs))]
    for file, document in zip(files, configs, strict=True):
        write_bytes(file, (document.model_dump_json(indent=1, by_alias=False) + "\n").encode())
    return files


def _play(
    call: _Call,
    config: RunConfig,
    supervisor: Supervisor,
    sink: SinkProcess | None,
    specs: list[RoleProcess],
    place: _Place,
    recorder: Recorder,
) -> Running | None:
    """Start the processes, show the run, and stop them at its end.

    Returns:
        The process that failed; None: all is well, or a signal came.
    """
    shared = shares(config)
    try:
        supervisor.start(specs)
        if shared:
            offer(call.paths, place.ports)
        view = View(
            call.console, name=call.name, max_steps=call.spec.max_steps if call.trains else None,
            metrics=call.paths.metrics, url=f"http://127.0.0.1:{place.ports.metrics}", api_key=place.api_key,
            plain=call.options.plain or not call.console.is_terminal,
        )  # fmt: skip
        with view:
            failed = _watch(supervisor, view, call.interrupted, sink, recorder, shared=shared)
            view.update("")
        if failed:
            explain(failed, call.paths.root)
            print("stopping the other processes", file=sys.stderr)
        return failed
    finally:
        withdraw(call.paths)
        asked = len(call.interrupted)
        if call.interrupted:
            kept = "the last trained step is being saved" if call.trains else "what was answered is kept"
            call.say(
                f"\nstopping: {kept} (Ctrl-C again stops at once, without that)"
                if call.trains
                else f"\nstopping: {kept}"
            )
        supervisor.stop(
            config.trainer.checkpoint.grace_period_seconds + STOP_SECONDS, hurry=lambda: len(call.interrupted) > asked
        )
        if sink is not None:
            _end_tracking(call, sink, hurry=lambda: len(call.interrupted) > asked)


def _conclude(call: _Call, failed: Running | None, *, elapsed_seconds: float) -> int:
    """Say how the run ended and how it goes on; the exit code."""
    if call.interrupted:
        return _farewell_of_signal(call)
    if failed:
        print("\n".join(["everything is stopped", *call.farewell(failed=True)]), file=sys.stderr)
        return exit_code(failed, call.paths.root)
    if call.trains:
        print_summary(call.console, call.paths.root, elapsed_seconds=elapsed_seconds, command=call.command)
    else:
        print_measures(call.console, call.paths.root)
    return exit_codes.OK


def _farewell_of_signal(call: _Call) -> int:
    """Say what a run leaves that a signal has ended; the exit code."""
    name = (
        f" by {signal.Signals(call.interrupted[0]).name}" if call.interrupted[:1] not in ([], [signal.SIGINT]) else ""
    )
    if not call.begun:
        call.say(f"interrupted{name}: nothing was started")
    else:
        call.say("\n".join([f"interrupted{name}: everything is stopped", *call.farewell(failed=False)]))
    return exit_codes.INTERRUPTED


def _end_tracking(call: _Call, sink: SinkProcess, *, hurry: Callable[[], bool]) -> None:
    """Have the trackers get the rest; say what to do where they do not."""
    if not sink.stop(hurry=hurry):
        log = log_file(Path(call.folder))
        call.say(
            f"not everything has reached the trackers ({log} says why); `rlrun track {call.folder}` sends the rest"
        )


def _watch(
    supervisor: Supervisor,
    view: View,
    interrupted: list[int],
    sink: SinkProcess | None,
    recorder: Recorder,
    *,
    shared: bool,
) -> Running | None:
    """Follow the run until the orchestrator has ended it (None), a role has failed (that role), or a signal came (None).

    A trainer that other runs share ends when the last of them has left it.
    """
    began = time.monotonic()
    while not interrupted:
        if sink is not None:
            sink.keep()
        ended = supervisor.exited()
        done = {r.spec.role for r in ended if r.process.returncode == 0} - {"inference"}
        if done >= ({"orchestrator", "trainer"} if shared else {"orchestrator"}):
            return None
        # The trainer may end with 0 before the orchestrator, when that asked it to; an engine never may.
        failed = [r for r in ended if r.process.returncode != 0 or r.spec.role == "inference"]
        if failed:
            return first_cause(failed)
        view.update(f"the roles to start since {duration(time.monotonic() - began)}")
        recorder.beat(view.progress)
        time.sleep(_POLL_SECONDS)
    return None


def _uid(paths: RunPaths, known: bool) -> str:
    before = read_identity(paths) if known else None
    return str(uuid.uuid4()) if before is None else before[1]
