"""Settings of one inference server, from the run's configuration to vLLM's command line and environment variables.

No default depends on the machine. Command line and variables are computed from the settings without side effects.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rlrun.config.families import choose_state_dtype, explain_engine_dtype, has_vision
from rlrun.config.models.engine_arguments import problem_of_arguments
from rlrun.config.models.roles import TRAINING_TASKS, InferenceConfig
from rlrun.hub.fetch import model_source, needs_plain_copy
from rlrun.hub.refused_models import read_config
from rlrun.hub.repository import keep_revisions
from rlrun.protocol.files.paths import RunPaths

Device = Literal["cpu", "cuda"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the maximum rank; an adapter can have any lower rank."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
_POLL_SECONDS = 1.0
_LOG_SECONDS = 60.0
"""Interval of log lines while an engine waits for the copy of a quantized model."""


class SettingsError(ValueError):
    """Error for an invalid setting; the message contains the field, its value and a fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """Settings of one vLLM server. Times in seconds, memory in GiB.

    Raises `SettingsError` for values with which no server can run.
    """

    model_path: str
    """Local folder (config, tokenizer, safetensors) or a Hugging Face model id."""
    served_model_name: str
    weights_dir: str
    """Root folder of published weights: `/rlrun/update_weights` loads only from below it. It may appear after the start."""
    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    device: Device = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    """Maximum tokens of prompt plus completion. None: the limit in the model's config."""
    max_num_seqs: int = 256
    """Maximum sequences in one engine step, per data-parallel rank."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    """Fraction of the memory of one GPU (CUDA only)."""
    kv_cache_gib: int = 1
    """KV cache of the CPU backend in GiB."""
    cpu_threads: int = 1
    """OpenMP threads per worker (CPU only)."""
    seed: int = 0
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: a faster start and a slower engine."""
    max_lora_rank: int | None = None
    """Maximum rank of adapters (PEFT folders) that are served on the unchanged model. None: whole weights are loaded."""
    lora_runs: int = 1
    """Number of runs whose adapters are served at the same time. If greater than 1, `weights_dir` contains the folders of all runs."""
    receives: bool = False
    """Receive versions from the trainer's memory over NCCL or gloo instead of loading folders."""
    deltas: bool = False
    """Keep the served version in shared memory, and build the next version from it and its differences."""
    colocated: bool = False
    """Share the GPUs with the trainer: start asleep, and sleep on request until the next hand-over."""
    update_timeout: float = 600.0
    """Deadline of one weight update, without the wait for a previous update."""
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 30.0
    """Time without a response of the workers after which the engine counts as dead."""
    revision: str | None = None
    """Branch, tag or commit of the model on the Hugging Face Hub. None: the main branch."""
    trust_remote_code: bool = False
    """Execute Python code from the model's repository."""
    model_class: str | None = None
    """Import path of the run's own model class. None: the class that vLLM selects."""
    state_dtype: str | None = None
    """Number format of the recurrent state of a hybrid model. None: vLLM's default for the model."""
    language_model_only: bool = False
    """Leave out the model's encoder of images, because requests have only text."""
    return_routes: bool = False
    """Return the experts of each token of a mixture."""
    extra_args: tuple[str, ...] = ()
    """Additional vLLM flags, such as `--block-size=32`."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise SettingsError(f"device: {self.device!r} is unknown; use 'cpu' or 'cuda'")
        if self.dtype not in DTYPES or (self.device == "cpu" and self.dtype == "float16"):
            raise SettingsError(f"dtype: {self.dtype!r} does not work on {self.device}; use 'bfloat16' or 'float32'")
        if len(self.api_key) < 8:
            raise SettingsError(f"apiKey: got {len(self.api_key)} characters, expected at least 8")
        if not 0 < self.port < 65536:
            raise SettingsError(f"port: {self.port} is not between 1 and 65535")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingsError(f"gpuMemoryUtilization: {self.gpu_memory_utilization} is not in (0, 1]")
        for name in ("tensor_parallel", "data_parallel", "max_num_seqs", "kv_cache_gib", "cpu_threads", "lora_runs"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} is less than 1")
        if self.max_lora_rank is not None and not 0 < self.max_lora_rank <= LORA_RANKS[-1]:
            raise SettingsError(f"maxLoraRank: {self.max_lora_rank} is not between 1 and {LORA_RANKS[-1]}")
        if self.receives and self.max_lora_rank is not None:
            raise SettingsError("receives: adapters are loaded only from folders; remove maxLoraRank or receives")
        if (problem := problem_of_arguments(self.extra_args)) is not None:
            raise SettingsError(problem)

    @property
    def local_model(self) -> bool:
        """Whether the model is a folder of this machine; otherwise it is a Hugging Face id."""
        return Path(self.model_path).is_dir()


def settings_from_mapping(values: Mapping[str, Any]) -> InferenceSettings:
    """Return settings from parsed JSON; raises `SettingsError` for unknown or missing fields."""
    known = {f.name for f in fields(InferenceSettings)}
    if unknown := sorted(set(values) - known):
        raise SettingsError(f"unknown field {unknown[0]!r}; known fields: {', '.join(sorted(known))}")
    arguments = dict(values)
    if "extra_args" in arguments:
        arguments["extra_args"] = tuple(arguments["extra_args"])
    try:
        return InferenceSettings(**arguments)
    except TypeError as error:
        raise SettingsError(str(error).replace("InferenceSettings.__init__() ", "")) from None


def settings_from_file(path: Path) -> InferenceSettings:
    """Return settings from a JSON file; raises `SettingsError` with the name of the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected a JSON object")
    try:
        return settings_from_mapping(values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


KEEP_ALIVE_SECONDS = 75
"""Seconds for which idle connections stay open: longer than the client keeps them, so it never writes to a closing connection."""

WORKER_EXTENSION = "rlrun.inference.weights.loading.Loading"
"""Class whose methods vLLM adds to its workers."""
ENGINE_VARIABLE = "RLRUN_ENGINE"
"""Environment variable of the processes of a run's engine; RLRun's vLLM plugin does nothing without it."""
MODEL_CLASS_VARIABLE = "RLRUN_MODEL_CLASS"
"""Environment variable of the processes of an engine with the import path of the run's own model class."""
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""Environment variable of vLLM: 1, its default, samples top-k and top-p with FlashInfer."""
MAX_LORAS = 4
"""Adapters per run in one engine step: requests of this many versions are computed together; requests of other versions wait."""
MAX_LOADED_LORAS = 32
"""Adapters per run that an engine keeps loaded. An adapter of requests in flight must not be evicted, see `lora_adapters`."""


def vllm_arguments(settings: InferenceSettings) -> list[str]:
    """Return the arguments of vLLM's OpenAI server, without the API key: every user can see arguments in `ps`."""
    arguments = [
        f"--model={settings.model_path}",
        f"--served-model-name={settings.served_model_name}",
        f"--host={settings.host}",
        f"--port={settings.port}",
        f"--dtype={settings.dtype}",
        f"--seed={settings.seed}",
        f"--max-num-seqs={settings.max_num_seqs}",
        f"--tensor-parallel-size={settings.tensor_parallel}",
        f"--data-parallel-size={settings.data_parallel}",
        # Enables the route with tokens in and out, log-probs and versions.
        "--enable-scale-out",
        # Log-probs of the distribution that was sampled from, after temperature and top-p.
        "--logprobs-mode=processed_logprobs",
        "--enable-prefix-caching",
        # Never load pickled checkpoints, which can execute code.
        "--load-format=safetensors",
        f"--worker-extension-cls={WORKER_EXTENSION}",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level=warning",
    ]
    if settings.max_lora_rank is not None:
        rank = next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank)
        arguments += [
            "--enable-lora",
            f"--max-lora-rank={rank}",
            f"--max-loras={MAX_LORAS * settings.lora_runs}",
            f"--max-cpu-loras={MAX_LOADED_LORAS * settings.lora_runs}",
        ]
    if settings.max_model_len is not None:
        arguments.append(f"--max-model-len={settings.max_model_len}")
    if settings.device == "cuda":
        arguments.append(f"--gpu-memory-utilization={settings.gpu_memory_utilization}")
        if settings.colocated:
            arguments.append("--enable-sleep-mode")
    if settings.enforce_eager:
        arguments.append("--enforce-eager")
    if settings.revision is not None:
        arguments.append(f"--revision={settings.revision}")
    if settings.trust_remote_code:
        arguments.append("--trust-remote-code")
    if settings.state_dtype is not None:  # before `extra_args`, which may contain another value: the last one counts
        arguments.append(f"--mamba-ssm-cache-dtype={settings.state_dtype}")
    if settings.language_model_only:
        arguments.append("--language-model-only")
    if settings.return_routes:
        arguments.append("--enable-return-routed-experts")
    return [*arguments, *settings.extra_args]


def vllm_environment(settings: InferenceSettings) -> dict[str, str]:
    """Return variables that must be set before vLLM is imported; they override inherited values."""
    environment = {
        # RLRun's router calls the engine directly, so vLLM's development routes are not needed.
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        ENGINE_VARIABLE: "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
    }
    if settings.model_class is not None:
        environment[MODEL_CLASS_VARIABLE] = settings.model_class
    if settings.colocated:
        # vLLM's sleep mode needs an allocator without expandable segments, which are set for the trainer on the same GPU.
        environment |= {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}
    if settings.local_model:
        environment["HF_HUB_OFFLINE"] = "1"
    if settings.device == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.cpu_threads),
        }
        if settings.enforce_eager:
            # vLLM compiles two small sampling functions even in eager mode; on CPU that delays the first request
            # by 15 s in a C++ compiler and gains nothing.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if settings.tensor_parallel == 1:
            # Run the only worker inside the engine's process: a third less start time and 1 GB less memory. vLLM
            # otherwise uses a process per worker to bind threads to cores; `nobind` makes that unnecessary.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def has_cuda_compiler(variables: Mapping[str, str]) -> bool:
    """Return whether FlashInfer finds nvcc: in CUDA_HOME or CUDA_PATH if one of them is set, else on the PATH or in /usr/local/cuda."""
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if home:
        return shutil.which(str(Path(home, "bin", "nvcc"))) is not None
    path = variables.get("PATH", os.defpath)
    return any(shutil.which(nvcc, path=path) is not None for nvcc in ("nvcc", "/usr/local/cuda/bin/nvcc"))


def default_vllm_environment(settings: InferenceSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return variables that must be set before vLLM is imported, unless the user's environment contains them.

    Args:
        settings: settings of the server.
        inherited: environment of this process.
    """
    if settings.device == "cpu" or FLASHINFER_SAMPLER in inherited or has_cuda_compiler(inherited):
        return {}
    # FlashInfer compiles its sampler with nvcc when an engine starts; images for GPUs have no nvcc (except their target `devel`).
    return {FLASHINFER_SAMPLER: "0"}


def with_local_model(config: InferenceConfig) -> InferenceConfig:
    """Return the configuration with the local folder of the model's files.

    A model of the hub is downloaded unless it is cached. For training, the folder of a quantized model is the run's plain copy, because
    the versions that the trainer publishes are plain too.

    Raises:
        RoleError: the model cannot be downloaded, or cannot be trained.
    """
    model, trained = config.model, config.task in TRAINING_TASKS
    if model.tiny is not None or (model.path is not None and not trained):
        return config
    paths = RunPaths(Path(config.output_dir))
    keep_revisions(paths)
    if trained and needs_plain_copy(model):
        _wait_for_plain_copy(paths.model)
    folder = model_source(model, paths.model, with_weights=True, trained=trained)
    return config.model_copy(
        update={"model": model.model_copy(update={"name": None, "revision": None, "path": folder})}
    )


def _wait_for_plain_copy(folder: Path) -> None:
    """Wait for the copy, which the trainer's first process writes; it appears when it is complete."""
    logged_at = float("-inf")
    while not folder.is_dir():
        if time.monotonic() - logged_at >= _LOG_SECONDS:
            print(
                f"inference: waiting for {folder}, the copy of the quantized model that the trainer writes", flush=True
            )
            logged_at = time.monotonic()
        time.sleep(_POLL_SECONDS)


def settings_from_config(config: InferenceConfig, *, api_key: str) -> InferenceSettings:
    """Return the settings of an engine for this run; raises `SettingsError` for invalid values."""
    paths, model = RunPaths(Path(config.output_dir)), config.model
    lora = config.lora if config.lora is not None and config.lora.served_as_adapter else None
    runs = lora.slots if lora is not None else 1
    source = model.source(paths.model)
    files = read_config(Path(source)) or {}
    if (fault := explain_engine_dtype(files, model.dtype, gpus=config.gpus_per_replica)) is not None:
        raise SettingsError(f"model.dtype: {fault}")
    return InferenceSettings(
        model_path=source,
        served_model_name=config.name,
        weights_dir=str(paths.weights if runs == 1 else paths.root.parent),
        api_key=api_key,
        host=config.host,
        port=config.port,
        device="cuda" if config.gpus_per_replica else "cpu",
        dtype=model.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel=config.tensor_parallel,
        data_parallel=config.data_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_gib=config.cpu_kv_cache_gib,
        seed=config.seed,
        max_lora_rank=lora.rank if lora is not None else None,
        lora_runs=runs,
        receives=config.weight_sync.transport == "NCCL",
        deltas=config.weight_sync.deltas == "Auto",
        colocated=config.colocated,
        enforce_eager=config.gpus_per_replica == 0,  # on CPU compiling costs minutes and gains nothing
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        model_class=model.class_,
        state_dtype=choose_state_dtype(files),
        language_model_only=has_vision(files),
        return_routes=config.return_routes,
        extra_args=tuple(config.extra_args),
    )
