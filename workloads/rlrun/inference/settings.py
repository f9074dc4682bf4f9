"""Resolved settings of one inference server: no default depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rlrun.config.models.engine_arguments import problem_of_arguments

Device = Literal["cpu", "cuda"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as the highest rank; an adapter's own rank may be any below."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


class SettingsError(ValueError):
    """A setting that cannot work; the message names the field, its value and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """One vLLM server. Times in seconds, memory in GiB.

    Raises `SettingsError` for values that no server could run with.
    """

    model_path: str
    """Local folder (config, tokenizer, safetensors) or a Hugging Face model id."""
    served_model_name: str
    weights_dir: str
    """The only folder below which `/rlrun/update_weights` loads weights. It may appear after the start."""
    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    device: Device = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and completion together; None: as in the model's config."""
    max_num_seqs: int = 256
    """Sequences in one engine step, per data-parallel rank."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    """Fraction of one GPU's memory (CUDA only)."""
    kv_cache_gib: int = 1
    """KV cache of the CPU backend, which counts in whole GiB."""
    cpu_threads: int = 1
    """OpenMP threads per worker (CPU only)."""
    seed: int = 0
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: a quicker start and a slower engine."""
    max_lora_rank: int | None = None
    """Serve adapters (PEFT folders) of up to this rank on the unchanged model; None: whole weights are handed over."""
    lora_runs: int = 1
    """Runs whose adapters are served at the same time; with more than one, `weights_dir` is the folder of all runs' folders."""
    receives: bool = False
    """Take versions from the trainer's memory, over NCCL or gloo, instead of from folders."""
    deltas: bool = False
    """Keep the served version in shared memory, and make the next one from it and what differs."""
    colocated: bool = False
    """Share the GPUs with the trainer: start asleep, and sleep on request, until the next hand-over."""
    update_timeout: float = 600.0
    """Deadline of one weight update, without waiting for another one."""
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 30.0
    """The engine counts as dead when its workers did not answer for this long."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub; None: the main branch."""
    trust_remote_code: bool = False
    """Run Python code of the model's repository."""
    extra_args: tuple[str, ...] = ()
    """Further vLLM flags, such as `--block-size=32`."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise SettingsError(f"device: {self.device!r} is unknown; use 'cpu' or 'cuda'")
        if self.dtype not in DTYPES or (self.device == "cpu" and self.dtype == "float16"):
            raise SettingsError(f"dtype: {self.dtype!r} does not work on {self.device}; use 'bfloat16' or 'float32'")
        if len(self.api_key) < 8:
            raise SettingsError("apiKey: at least 8 characters are needed, the key guards the engine's weights")
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
            raise SettingsError("receives: adapters are handed over as folders; remove maxLoraRank or receives")
        if (problem := problem_of_arguments(self.extra_args)) is not None:
            raise SettingsError(problem)

    @property
    def local_model(self) -> bool:
        """True if the model is a folder of this machine; else it is a Hugging Face id."""
        return Path(self.model_path).is_dir()


def settings_from_mapping(values: Mapping[str, Any]) -> InferenceSettings:
    """Settings from parsed JSON; raises `SettingsError` on unknown or missing fields."""
    known = {f.name for f in fields(InferenceSettings)}
    if unknown := sorted(set(values) - known):
        raise SettingsError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    arguments = dict(values)
    if "extra_args" in arguments:
        arguments["extra_args"] = tuple(arguments["extra_args"])
    try:
        return InferenceSettings(**arguments)
    except TypeError as error:
        raise SettingsError(str(error).replace("InferenceSettings.__init__() ", "")) from None


def settings_from_file(path: Path) -> InferenceSettings:
    """Settings from a JSON file; raises `SettingsError` naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: a JSON object is needed")
    try:
        return settings_from_mapping(values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
