"""Resolved settings of one inference server; no default depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rlrun.config.models.engine_arguments import problem_of_arguments

Device = Literal["cpu", "cuda"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the maximum rank; an adapter can have any lower rank."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


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
