"""Processes of one attempt on this machine, as a pure function of configuration, ports and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlrun.config.models.roles import TRAINING_TASKS, orchestrator_module
from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.files.failures import ERROR_FILE, ROLE_ENVIRONMENT
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.processes import LAUNCH_VARIABLE
from rlrun.trainer.ranks.launch import torchrun_command

GpuId = int | str
"""GPU of this machine: its index or its UUID."""


@dataclass(frozen=True)
class Ports:
    """Port of each process."""

    trainer: int
    rendezvous: int
    metrics: int
    inference: tuple[int, ...]

    def ports_by_name(self) -> dict[str, int]:
        """Return all ports by their names in messages."""
        engines = {
            f"inference {i}" if len(self.inference) > 1 else "inference": p for i, p in enumerate(self.inference)
        }
        return {
            "trainer": self.trainer,
            "trainer rendezvous": self.rendezvous,
            "orchestrator metrics": self.metrics,
        } | engines


@dataclass(frozen=True)
class RoleProcess:
    """One process to start."""

    role: Role
    name: str
    """Name in messages: the role, with a number if there are several processes."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment variables in addition to those of the launcher."""
    log: Path
    error_file: Path
    """File to which the role writes its error message."""

    @property
    def gpus(self) -> str:
        """GPUs of the process in the format of CUDA_VISIBLE_DEVICES; empty if it has none."""
        return self.environment.get("CUDA_VISIBLE_DEVICES", "")


def with_endpoints(config: RunConfig, ports: Ports, replay: str | None, running: Sequence[str] = ()) -> list[RunConfig]:
    """Return the configuration with the addresses of this attempt, once per engine that is started, or once without engines.

    Args:
        config: configuration of the run.
        ports: ports of the attempt. The configurations of the engines differ only in the engine's port.
        replay: folder of recorded batches, if they replace new ones.
        running: addresses of engines that already run, instead of engines to start.
    """
    places: dict[str, object] = {
        "trainer_url": f"http://127.0.0.1:{ports.trainer}",
        "metrics_port": ports.metrics,
        "replay": replay,
    }
    if ports.inference or running:
        places["inference_urls"] = [*running] or [f"http://127.0.0.1:{port}" for port in ports.inference]
    colocated = config.trainer.colocated and config.inference is not None  # a replay has no engines
    places["colocated"] = colocated
    beside = places.get("inference_urls") if colocated else []
    orchestrator = config.orchestrator.model_copy(update=places)
    trainer = config.trainer.model_copy(
        update={"port": ports.trainer, "colocated": colocated, "engine_urls": beside or []}
    )
    placed = config.model_copy(update={"trainer": trainer, "orchestrator": orchestrator})
    inference = config.inference
    if inference is None or config.trainer.shared_with is not None or running:
        return [placed]
    return [
        placed.model_copy(update={"inference": inference.model_copy(update={"port": port})}) for port in ports.inference
    ]


def gpus_wanted(config: RunConfig) -> tuple[int, int]:
    """Return the numbers of GPUs that trainer and engines need. Engines that share the trainer's GPUs need 0."""
    engine = config.inference
    own = engine is not None and not engine.colocated
    return (
        config.trainer.replicas * config.trainer.gpus_per_replica,
        engine.replicas * engine.gpus_per_replica if engine is not None and own else 0,
    )


def split_gpus(
    config: RunConfig,
    available: Sequence[GpuId],
    trainer_ids: Sequence[GpuId] | None,
    inference_ids: Sequence[GpuId] | None,
) -> tuple[list[GpuId], list[GpuId]]:
    """Assign GPUs to trainer and engines. Explicit ids take precedence.

    Raises:
        ValueError: the machine has too few GPUs; the message contains the numbers.
    """
    want_trainer, want_inference = gpus_wanted(config)
    engine = config.inference
    colocated = engine is not None and engine.colocated
    if colocated and inference_ids is not None:
        raise ValueError("placement.colocate makes the engines use the trainer's GPUs; remove --inference-gpu-ids")
    free = _without_role(available, (*(trainer_ids or ()), *(inference_ids or ())))
    inference = list(inference_ids) if inference_ids is not None else free[:want_inference]
    trainer = list(trainer_ids) if trainer_ids is not None else _without_role(free, inference)[:want_trainer]
    _check_gpus("trainer", want_trainer, trainer, available)
    _check_gpus("inference", want_inference, inference, available)
    return trainer, trainer if colocated else inference


def _without_role(gpus: Sequence[GpuId], taken: Sequence[GpuId]) -> list[GpuId]:
    return [gpu for gpu in gpus if gpu not in taken]


def _check_gpus(role: Role, wanted: int, got: Sequence[GpuId], available: Sequence[GpuId]) -> None:
    missing = _without_role(got, available)
    if missing:
        raise ValueError(f"{role}: this machine has no GPU {missing[0]}; it has {list(available) or 'none'}")
    if len(got) < wanted:
        raise ValueError(
            f"{role} needs {wanted} GPUs (replicas x gpusPerReplica), but only {len(got)} of {len(available)} are free for it; "
            f"lower spec.{role}.gpusPerReplica, or share GPUs with --trainer-gpu-ids and --inference-gpu-ids and a lower "
            "spec.inference.gpuMemoryUtilization"
        )


def plan_processes(
    configs: Sequence[RunConfig],
    files: Sequence[Path],
    *,
    attempt: int,
    api_key: str,
    launch_id: str,
    ports: Ports,
    trainer_gpus: Sequence[GpuId],
    inference_gpus: Sequence[GpuId],
) -> list[RoleProcess]:
    """Return the processes to start.

    Args:
        configs: configurations of `with_endpoints`, one per engine.
        files: files of these configurations.
        attempt: number of the attempt.
        api_key: key of the run. It is passed in environment variables, because other users can read command lines.
        launch_id: mark of every process of this launch, by which exactly these processes are found and ended.
        ports: ports of the processes.
        trainer_gpus: GPUs of the trainer.
        inference_gpus: GPUs of the engines, assigned in order.
    """
    config = configs[0]
    trains = config.trainer.task in TRAINING_TASKS
    engine = config.inference
    on_cpu = config.trainer.gpus_per_replica == 0 and (trains or engine is None or engine.gpus_per_replica == 0)
    make_process = _plan_maker(config, attempt, api_key, launch_id, on_cpu=on_cpu)
    trainer = torchrun_command(config.trainer, config_file=files[0], rendezvous_port=ports.rendezvous, attempt=attempt)
    module = orchestrator_module(config.trainer.task)
    orchestrator = make_process("orchestrator", "orchestrator", module_command(module, _launch_command(files[0])), ())
    if not trains:
        return [*_plan_engines(config, files, inference_gpus, make_process), orchestrator]
    if config.trainer.shared_with is not None:  # the host run has trainer and engines
        return [orchestrator]
    return [
        *_plan_engines(config, files, inference_gpus, make_process),
        make_process("trainer", "trainer", trainer, trainer_gpus),
        orchestrator,
    ]


def engine_processes(
    configs: Sequence[RunConfig],
    files: Sequence[Path],
    *,
    api_key: str,
    launch_id: str,
    gpus: Sequence[GpuId],
) -> list[RoleProcess]:
    """Return only the engines, for commands that sample without training.

    Args:
        configs: configurations of `with_endpoints`, one per engine.
        files: files of these configurations.
        api_key: see `plan_processes`.
        launch_id: see `plan_processes`.
        gpus: GPUs of the engines, assigned in order.
    """
    config = configs[0]
    assert config.inference is not None
    make_process = _plan_maker(config, 1, api_key, launch_id, on_cpu=config.inference.gpus_per_replica == 0)
    return _plan_engines(config, files, gpus, make_process)


class _Make(Protocol):
    def __call__(self, role: Role, name: str, command: list[str], gpus: Sequence[GpuId]) -> RoleProcess: ...


def _plan_maker(config: RunConfig, attempt: int, api_key: str, launch_id: str, *, on_cpu: bool) -> _Make:
    paths = RunPaths(Path(config.trainer.output_dir))
    shared = {
        "RLRUN_ATTEMPT": str(attempt),
        "RLRUN_API_KEY": api_key,
        LAUNCH_VARIABLE: launch_id,
        **ROLE_ENVIRONMENT,
    }
    if on_cpu:
        shared["OMP_NUM_THREADS"] = (
            "1"  # ranks, engine and orchestrator share the cores, so more threads slow each other down
        )

    def make_process(role: Role, name: str, command: list[str], gpus: Sequence[GpuId]) -> RoleProcess:
        folder = paths.logs(attempt, role)
        environment = shared | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return RoleProcess(role, name, tuple(command), environment, folder / f"{name}.log", folder / ERROR_FILE)

    return make_process


def _plan_engines(
    config: RunConfig, files: Sequence[Path], gpus: Sequence[GpuId], make_process: _Make
) -> list[RoleProcess]:
    if config.inference is None:
        return []
    each = config.inference.gpus_per_replica
    return [
        make_process(
            "inference",
            f"inference-{i}" if len(files) > 1 else "inference",
            module_command(ENGINE_MODULE, _launch_command(file)),
            gpus[i * each : (i + 1) * each],
        )
        for i, file in enumerate(files)
    ]


def _launch_command(file: Path) -> list[str]:
    return ["--config", str(file)]


ENGINE_MODULE = "rlrun.inference"
"""Module that an engine's process runs."""
