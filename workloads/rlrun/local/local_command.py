"""`rlrun local run.yaml`: start all roles, show the run and end all processes. The exit code is 0 only for a complete run."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import Variation, field_options, manifest_text, parse_manifest, take_variation
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser, own_options, whole_number, whole_numbers
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.local import shared_processes
from rlrun.local.gpus import gpu_ids
from rlrun.local.judge import judge_manifest, report_and_stop
from rlrun.local.launcher import (
    Call,
    check_recorded,
    check_replay,
    conclude_run,
    farewell_of_signal,
    find_place,
    play_run,
    resolve_config,
    with_place,
    without_folder,
    write_configs,
)
from rlrun.local.made_model import prepare_model
from rlrun.local.preflight import check_packages, check_trackers
from rlrun.local.process_plan import plan_processes
from rlrun.local.read_inputs import describe_inputs
from rlrun.local.supervisor import Supervisor
from rlrun.local.user_code import check_recorded_manifest
from rlrun.mirror.mirror_starter import mirror_beside
from rlrun.protocol.files.attempts import RESUME_REQUIRED_VARIABLE, next_number
from rlrun.protocol.files.durable import make_private_folder, write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import UNCLAIMED
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import FLAG, HELP, note_started_run
from rlrun.protocol.files.run_folder import keep_config
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.options import full_names
from rlrun.tracking.sink_starter import SinkProcess

_MAX_PORT = 65_535


def local_parser() -> Parser:
    """Return the parser of `rlrun local`."""
    p = Parser(
        "rlrun local",
        "Run all roles of a run on this machine. Fields of spec are options, too, after the manifest; "
        "--wandb, --wandb.project NAME, --tensorboard and similar options turn trackers on.",
    )
    p.add_argument("manifest", help="an RLRun manifest")
    p.add_argument("--dry-run", action="store_true", help="print the configuration of all roles, and start nothing")
    add_options(p)
    return p


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options that `rlrun local` and `rl` share."""
    p.add_argument("--output-dir", help="the run's folder (default: runs/<name>)")
    p.add_argument(
        "--resume", action="store_true", help="continue the run in the folder from its last complete checkpoint"
    )
    p.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume: continue the run although another launcher still runs it",
    )
    p.add_argument(FLAG, action="store_true", help=f"with --resume: {HELP}")
    p.add_argument(
        "--replay", metavar="DIR", help="train on recorded batches (rollouts/ of another run) instead of new ones"
    )
    p.add_argument(
        "--inference-port",
        type=whole_numbers(1, _MAX_PORT, such_as="8000,8001"),
        help="port of the engine, or one per replica: 8000,8001 (default: free ones)",
    )
    p.add_argument(
        "--trainer-port", type=whole_number(1, _MAX_PORT), help="port of the trainer's channel (default: a free one)"
    )
    p.add_argument(
        "--metrics-port",
        type=whole_number(1, _MAX_PORT),
        help="port of the orchestrator's metrics (default: a free one)",
    )
    p.add_argument("--trainer-gpu-ids", type=gpu_ids, help="GPUs of the trainer, by index or UUID, such as 2,3")
    p.add_argument("--inference-gpu-ids", type=gpu_ids, help="GPUs of the engines, such as 0,1")
    p.add_argument("--share-gpus", action="store_true", help="use GPUs that other runs of this machine use, too")
    shared_processes.add_option(p)
    p.add_argument("--plain", action="store_true", help="print a line per step instead of the live view")


def main(argv: Sequence[str], *, task: str | None = None) -> int:
    """Run `rlrun local` and return the exit code.

    Args:
        argv: command line without the program's name.
        task: only task that the calling command can start. Default: any task.
    """
    return not_yet(lambda: _run_main(argv, task))


def not_yet(start: Callable[[], int]) -> int:
    """Return the exit code of `start`. A signal before `start` handles signals itself means that nothing was started."""
    try:
        return start()
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was started", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _run_main(argv: Sequence[str], task: str | None) -> int:
    rest, varied = take_variation(full_names(argv), own_options(p := local_parser()))
    p.also = field_options()
    options = p.parse_args(rest)
    if options.dry_run:
        return _print_config(options, varied)
    console = Console(stderr=False)
    try:
        check_packages((*extras.TRAINING, *extras.SAMPLING))
        text = read_text(Path(options.manifest))
        check_recorded_manifest(Path(options.manifest), text, varied, trusted=options.trust_recorded_code)
    except RoleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    judged = judge_manifest(text, options.manifest, here=True, variation=Variation(varied, os.environ))
    code = report_and_stop(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    run = judged.run
    if task not in (None, run.spec.task):
        fix = f"start it with rlrun local {shlex.quote(options.manifest)}"
        problem = Problem(options.manifest, "spec.task", f"got {run.spec.task}, but this command starts {task}; {fix}")
        print(problem, file=sys.stderr)
        return exit_codes.CONFIGURATION
    return run_spec(
        run.spec,
        name=run.metadata.name,
        options=options,
        console=console,
        command=shlex.join(["rlrun", "local", *without_folder(argv)]),
    )


def _print_config(options: argparse.Namespace, varied: Sequence[str]) -> int:
    """Print the resolved configuration of the run and return the exit code."""
    try:
        manifest, layer = parse_manifest(
            read_text(Path(options.manifest)), options.manifest, Variation(varied, os.environ)
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    for notice in layer.notices:
        print(f"note: {notice}", file=sys.stderr)
    name = manifest.metadata.name
    root = Path(options.output_dir or Path("runs") / name).absolute()
    print(resolve_spec(manifest.spec, name=name, uid=UNCLAIMED, output_dir=str(root)).model_dump_json(indent=2))
    return exit_codes.OK


def run_spec(spec: RLRunSpec, *, name: str, options: argparse.Namespace, console: Console, command: str) -> int:
    """Run a specification to its end and return the exit code.

    Args:
        spec: validated specification.
        name: name of the run.
        options: options of `add_options`.
        console: console for the view.
        command: command of the user without the folder, for messages.
    """
    root = Path(options.output_dir or Path("runs") / name).absolute()
    interrupted: list[int] = []
    call = Call(spec, name, RunPaths(root), options, console, command, interrupted)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        interrupted.append(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with ExitStack() as held:
            return _run_local(call, held)
    except KeyboardInterrupt:
        return farewell_of_signal(call)
    except RoleError as error:
        print(
            "\n".join([f"error: {error}", *(call.farewell_lines(failed=True) if call.begun else ())]), file=sys.stderr
        )
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


def _run_local(call: Call, held: ExitStack) -> int:
    """Run to the end. Locks and ports that are claimed on the way are released with `held`."""
    began = time.monotonic()
    # Everything that can fail without a trace is checked before the first file is written.
    config = resolve_config(call)
    check_trackers(call.spec.tracking, os.environ)
    place = find_place(call, config, held)
    check_replay(call)
    check_recorded(call, config)
    configs = with_place(call, config, place)
    if not make_private_folder(call.paths.root):
        call.print_text(
            f"other users of this machine can open {call.folder}; close it with: chmod 700 {shlex.quote(str(call.folder))}"
        )
    # From here on the folder contains a run, so a failure prints how to continue it.
    call.begun.extend(files := write_configs(call.paths, configs))
    write_bytes(call.paths.manifest, manifest_text(call.spec, call.name).encode())
    attempt = next_number(call.paths)
    keep_config(call.paths, attempt, files[0].read_bytes())
    note_started_run(call.paths.root, configs[0])
    if place.host is None:
        prepare_model(config, files[0], call.paths, attempt, call.print_text, lambda: bool(call.interrupted))
    if call.interrupted:
        raise KeyboardInterrupt
    # The id marks every process of this launch in its environment variables, so that the supervisor finds and ends all of them.
    launch_id = uuid.uuid4().hex
    specs = plan_processes(
        configs, files, attempt=attempt, api_key=place.api_key, launch_id=launch_id, ports=place.ports,
        trainer_gpus=place.gpus.trainer, inference_gpus=place.gpus.inference,
    )  # fmt: skip
    if call.options.resume:
        required = {RESUME_REQUIRED_VARIABLE: "1"}
        specs = [replace(spec, environment={**spec.environment, **required}) for spec in specs]
    if call.options.engine_url:
        specs = [spec for spec in specs if spec.role != "inference"]
    call.print_text(
        f"run {call.name}, attempt {attempt}; folder {call.folder}, logs in {call.folder}/logs/attempt_{attempt:04d}"
    )
    for line in (*describe_inputs(config), f"starting {', '.join(spec.name for spec in specs)}"):
        call.print_text(line)
    supervisor = Supervisor(launch_id, place.gpus.descriptors)
    sink = SinkProcess(files[0], call.paths.root, os.environ) if enabled_trackers(config.tracking, os.environ) else None
    recorder = call.make_recorder(attempt, place.gpus, held)
    with mirror_beside(config, files[0], os.environ, say=call.print_text, hurry=lambda: bool(call.interrupted)):
        failed = play_run(call, config, supervisor, sink, specs, place, recorder)
        recorder.record_end("Interrupted" if call.interrupted else "Failed" if failed else "Complete", failed)
    return conclude_run(call, failed, elapsed_seconds=time.monotonic() - began)
