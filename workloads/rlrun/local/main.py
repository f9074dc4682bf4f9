"""`rlrun local run.yaml`: start all roles, show the run, end everything; exit code 0 only for a complete run."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from rlrun.api.resolve import resolve
from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.files import read_text
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run import RunConfig
from rlrun.local.failure import exit_code, explain, first_cause
from rlrun.local.judge import judge_manifest, stopped
from rlrun.local.measures import print_measures
from rlrun.local.model import prepare_model
from rlrun.local.plan import Ports, processes, split_gpus, with_endpoints
from rlrun.local.preflight import PreflightError, check_folder, check_ports, free_port, gpus
from rlrun.local.sharing import endpoints_of, joined, offer, shares, withdraw
from rlrun.local.summary import print_summary
from rlrun.local.supervisor import STOP_SECONDS, Running, Supervisor
from rlrun.local.view import View, duration
from rlrun.protocol.files.attempts import next_number
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_same_run, recorded_run
from rlrun.runtime import exit_codes

_POLL_SECONDS = 0.25
_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line of `rlrun local`."""
    p = Parser("rlrun local", "Run all roles of a run on this machine.")
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
        "--inference-port", type=_ports, help="port of the engine, or one per replica: 8000,8001 (default: free ones)"
    )
    p.add_argument("--trainer-port", type=int, help="port of the trainer's channel (default: a free one)")
    p.add_argument("--metrics-port", type=int, help="port of the orchestrator's metrics (default: a free one)")
    p.add_argument("--trainer-gpu-ids", type=_ports, help="GPUs of the trainer, such as 2,3")
    p.add_argument("--inference-gpu-ids", type=_ports, help="GPUs of the engines, such as 0,1")
    p.add_argument("--plain", action="store_true", help="print a line per step instead of the live view")


def _ports(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str]) -> int:
    """Run `rlrun local`; returns the exit code."""
    options = parser().parse_args(list(argv))
    console = Console(stderr=False)
    try:
        text = read_text(Path(options.manifest))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    judged = judge_manifest(text, options.manifest, here=True)
    code = stopped(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    run = judged.run
    return run_spec(
        run.spec, name=run.metadata.name, options=options, console=console, command=f"rlrun local {options.manifest}"
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

    def on_signal(number: int, _frame: FrameType | None) -> None:
        interrupted.append(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return _run(spec, name, root, options, console, command, interrupted)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except RoleError as error:
        print(f"error: {error}", file=sys.stderr)
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


def _run(
    spec: RLRunSpec,
    name: str,
    root: Path,
    options: argparse.Namespace,
    console: Console,
    command: str,
    interrupted: list[int],
) -> int:
    began = time.monotonic()
    paths = RunPaths(root)
    config = resolve(spec, name=name, uid=_uid(paths, options.resume), output_dir=str(root))
    trains = spec.task in TRAINING_TASKS
    if options.replay and config.orchestrator.evaluation is None:
        config = config.model_copy(update={"inference": None})  # nothing is sampled, so no engine is started
    host = config.trainer.shared_with
    if host is not None:
        _refuse_options_of_the_host(options, host)
    ports = _choose_ports(options, config)
    check_ports(ports)
    endpoints = None if host is None else endpoints_of(root, host)
    trainer_gpus: list[int] = []
    inference_gpus: list[int] = []
    if host is None:
        try:
            trainer_gpus, inference_gpus = split_gpus(
                config, gpus(), options.trainer_gpu_ids, options.inference_gpu_ids
            )
        except ValueError as error:
            raise PreflightError(str(error), exit_codes.UNAVAILABLE) from None
    if options.replay and spec.task != "RL":
        why = "supervised fine-tuning makes the same batches from its data again"
        raise PreflightError(f"--replay is for task RL: {why if spec.task == 'SFT' else 'nothing is trained'}")
    if options.replay and not Path(options.replay).is_dir():
        raise PreflightError(f"--replay: there is no folder {options.replay}")
    check_folder(root, resume=options.resume)
    before = recorded_run(paths) if options.resume else None
    if before is not None:
        check_same_run(before, config.trainer, remedy="choose another --output-dir to start a new run")
    replay = str(Path(options.replay).absolute()) if options.replay else None
    configs = with_endpoints(config, ports, replay)
    if endpoints is not None:
        configs = [joined(one, endpoints) for one in configs]
    files = [paths.run_json if i == 0 else paths.run_json.with_stem(f"run.{i}") for i in range(len(configs))]
    for file, document in zip(files, configs, strict=True):
        write_bytes(file, (document.model_dump_json(indent=1, by_alias=False) + "\n").encode())
    attempt = next_number(paths)
    if host is None:
        prepare_model(config, files[0], paths, attempt, console, lambda: bool(interrupted))
    if interrupted:
        return _INTERRUPTED
    launch_id = uuid.uuid4().hex
    api_key = secrets.token_urlsafe(32)
    supervisor = Supervisor(launch_id)
    specs = processes(
        configs, files, attempt=attempt, api_key=api_key, launch_id=launch_id, ports=ports,
        trainer_gpus=trainer_gpus, inference_gpus=inference_gpus,
    )  # fmt: skip
    plain = options.plain or not console.is_terminal
    where = _shown(root)
    console.print(
        f"run {name}, attempt {attempt}; folder {where}, logs in {where}/logs/attempt_{attempt:04d}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        supervisor.start(specs)
        if shares(config):
            offer(paths, ports)
        view = View(
            console, name=name, max_steps=spec.max_steps if trains else None, metrics=paths.metrics,
            url=f"http://127.0.0.1:{ports.metrics}", api_key=api_key, plain=plain,
        )  # fmt: skip
        with view:
            failed = _watch(supervisor, view, interrupted, shared=shares(config))
            view.update("")
        if failed:
            explain(failed, root)
    finally:
        withdraw(paths)
        asked = len(interrupted)
        if interrupted:
            console.print(
                f"stopping: {'the last finished step is saved' if trains else 'what was answered is kept'} (again Ctrl-C: stop at once)",
                highlight=False,
                soft_wrap=True,
            )
        supervisor.stop(
            config.trainer.checkpoint.grace_period_seconds + STOP_SECONDS, hurry=lambda: len(interrupted) > asked
        )
    if interrupted:
        console.print(
            f"interrupted: everything is stopped; go on with `{command} --output-dir {where} --resume`",
            highlight=False,
            soft_wrap=True,
        )
        return _INTERRUPTED
    if failed:
        print(
            f"everything is stopped; after mending it go on with `{command} --output-dir {where} --resume`",
            file=sys.stderr,
        )
        return exit_code(failed, root)
    if not trains:
        print_measures(console, root)
        return exit_codes.OK
    print_summary(console, root, elapsed_seconds=time.monotonic() - began, command=command)
    return exit_codes.OK


def _watch(supervisor: Supervisor, view: View, interrupted: list[int], *, shared: bool) -> Running | None:
    """Follow the run until the orchestrator has ended it (None), a role has failed (that role), or a signal came (None).

    A trainer that other runs share ends when the last of them has left it.
    """
    began = time.monotonic()
    while not interrupted:
        ended = supervisor.exited()
        done = {r.spec.role for r in ended if r.process.returncode == 0} - {"inference"}
        if done >= ({"orchestrator", "trainer"} if shared else {"orchestrator"}):
            return None
        # The trainer may end with 0 before the orchestrator, when that asked it to; an engine never may.
        failed = [r for r in ended if r.process.returncode != 0 or r.spec.role == "inference"]
        if failed:
            return first_cause(failed)
        view.update(f"roles starting since {duration(time.monotonic() - began)}")
        time.sleep(_POLL_SECONDS)
    return None


def _refuse_options_of_the_host(options: argparse.Namespace, host: str) -> None:
    """Refuse options of trainer and engines, which a guest does not start."""
    for name in ("trainer_port", "inference_port", "trainer_gpu_ids", "inference_gpu_ids"):
        if getattr(options, name) is not None:
            raise PreflightError(
                f"--{name.replace('_', '-')} is an affair of {host}, whose trainer and engines this run uses "
                "(spec.trainer.sharedWith); leave it out"
            )


def _choose_ports(options: argparse.Namespace, config: RunConfig) -> Ports:
    replicas = 0 if config.inference is None or config.trainer.shared_with is not None else config.inference.replicas
    chosen = options.inference_port or [free_port() for _ in range(replicas)]
    if len(chosen) != replicas:
        without = "task SFT" if config.trainer.task == "SFT" else "--replay without spec.evaluation"
        wanted = f"spec.inference.replicas is {replicas}" if replicas else f"{without} runs no engine; leave it out"
        raise PreflightError(f"--inference-port names {len(chosen)} ports, {wanted}")
    return Ports(options.trainer_port or free_port(), free_port(), options.metrics_port or free_port(), tuple(chosen))


def _uid(paths: RunPaths, resume: bool) -> str:
    before = recorded_run(paths) if resume else None
    return str(uuid.uuid4()) if before is None else before.uid


def _shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
