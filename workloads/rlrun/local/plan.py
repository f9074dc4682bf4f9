"""Processes of one attempt on this machine: a pure function of the configuration, the ports and the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlrun.config.models.roles import TRAINING_TASKS, orchestrator_module
from rlrun.config.models.run import RunConfig
from rlrun.protocol.files.failures import ERROR_FILE, ROLE_ENVIRONMENT
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.processes import LAUNCH_VARIABLE
from rlrun.trainer.ranks.launch import torchrun_command

GpuId = int | str
"""A GPU of this machine: its index, or its UUID."""


@dataclass(frozen=True)
class Ports:
    """Port of each process."""

    trainer: int
    rendezvous: int
    metrics: int
    inference: tuple[int, ...]

    def all(self) -> dict[str, int]:
        """Every port with the name that messages call it by."""
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
    """Name in messages: the role, with a number when there are several."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables added to this process's own environment."""
    log: Path
    error_file: Path
    """File into which the role writes what went wrong, for people."""

    @property
    def gpus(self) -> str:
        """Its GPUs, as CUDA reads them; empty: none."""
        return self.environment.get("CUDA_VISIBLE_DEVICES", "")


def with_endpoints(config: RunConfig, ports: Ports, replay: str | None, running: Sequence[str] = ()) -> list[RunConfig]:
    """The configuration with this attempt's addresses: one per engine, which differ only in the engine's port; one without engines.

    `running` are addresses of engines that are not started here.
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
    """Numbers of GPUs that trainer and engines have to themselves; engines that share the trainer's want none."""
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
    """GPUs of the trainer and of the engines; the ids that are given win.

    Raises:
        ValueError: the manifest wants more GPUs than there are; says how many.
    """
    want_trainer, want_inference = gpus_wanted(config)
    engine = config.inference
    colocated = engine is not None and engine.colocated
    if colocated and inference_ids is not None:
        raise ValueError("placement.colocate gives the engines the trainer's GPUs; leave --inference-gpu-ids out")
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
        raise ValueError(f"{role}: there is no GPU {missing[0]} on this machine; it has {list(available) or 'none'}")
    if len(got) < wanted:
        raise ValueError(
            f"{role} needs {wanted} GPUs (replicas x gpusPerReplica) and {len(got)} of {len(available)} are left for it; "
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
    """Processes to start.

    Args:
        configs: as `with_endpoints` gives them, one per engine.
        files: the configuration files they were written to.
        attempt: this attempt's number.
        api_key: the run's key; in the environment, never on a command line.
        launch_id: marks every process that this launch started, so that none is left and none of others is touched.
        ports: where to listen.
        trainer_gpus: indices of the trainer's GPUs.
        inference_gpus: indices of the engines' GPUs, dealt out in order.
    """
    config = configs[0]
    trains = config.trainer.task in TRAINING_TASKS
    engine = config.inference
    on_cpu = config.trainer.gpus_per_replica == 0 and (trains or engine is None or engine.gpus_per_replica == 0)
    make = _plan_maker(config, attempt, api_key, launch_id, on_cpu=on_cpu)
    trainer = torchrun_command(config.trainer, config_file=files[0], rendezvous_port=ports.rendezvous, attempt=attempt)
    module = orchestrator_module(config.trainer.task)
    orchestrator = make("orchestrator", "orchestrator", module_command(module, _launch_command(files[0])), ())
    if not trains:
        return [*_plan_engines(config, files, inference_gpus, make), orchestrator]
    if config.trainer.shared_with is not None:  # all else is the host's
        return [orchestrator]
    return [
        *_plan_engines(config, files, inference_gpus, make),
        make("trainer", "trainer", trainer, trainer_gpus),
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
    """The engines alone, for what samples without training.

    Args:
        configs: as `with_endpoints` gives them, one per engine.
        files: the configuration files they were written to.
        api_key: see `plan_processes`.
        launch_id: see `plan_processes`.
        gpus: indices of the engines' GPUs, dealt out in order.
    """
    config = configs[0]
    assert config.inference is not None
    make = _plan_maker(config, 1, api_key, launch_id, on_cpu=config.inference.gpus_per_replica == 0)
    return _plan_engines(config, files, gpus, make)


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
        shared["OMP_NUM_THREADS"] = "1"  # ranks, engine and orchestrator share the cores; more threads only fight

    def make(role: Role, name: str, command: list[str], gpus: Sequence[GpuId]) -> RoleProcess:
        folder = paths.logs(attempt, role)
        environment = shared | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return RoleProcess(role, name, tuple(command), environment, folder / f"{name}.log", folder / ERROR_FILE)

    return make


def _plan_engines(config: RunConfig, files: Sequence[Path], gpus: Sequence[GpuId], make: _Make) -> list[RoleProcess]:
    if config.inference is None:
        return []
    each = config.inference.gpus_per_replica
    return [
        make(
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
