"""Configurations of a run, and the ports and GPUs of its processes on this machine."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.config.models.run import RunConfig
from rlrun.local.launcher.call import Call
from rlrun.local.plan import Ports, with_endpoints
from rlrun.local.preflight import (
    PreflightError,
    check_engine,
    check_folder,
    check_ports,
    choose_ports,
    refuse_options_of_the_host,
)
from rlrun.local.recorded_manifest import code_of_folder
from rlrun.local.shared import running_engines
from rlrun.local.shared.gpus import Claim, claim_gpus
from rlrun.local.shared.sharing import Endpoints, endpoints_of, join_host
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.identity import read_identity
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.protocol.files.run_folder import check_same_run, recorded_run
from rlrun.protocol.files.shared import host_paths


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
        running_engines.check_engines(options, config, call.paths) if options.engine_url else secrets.token_urlsafe(32)
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
