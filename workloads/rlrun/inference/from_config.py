"""Settings of one server, derived from the run's configuration."""

from __future__ import annotations

from pathlib import Path

from rlrun.config.models.roles import TRAINING_TASKS, InferenceConfig
from rlrun.hub.fetch import model_source
from rlrun.hub.revisions import keep_revisions
from rlrun.inference.settings import InferenceSettings
from rlrun.protocol.files.paths import RunPaths


def with_local_model(config: InferenceConfig) -> InferenceConfig:
    """Download a Hugging Face model unless it is cached, and return the configuration with the model's local folder instead of its name.

    Raises:
        RoleError: the model cannot be downloaded.
    """
    model = config.model
    if model.name is None:
        return config
    paths = RunPaths(Path(config.output_dir))
    keep_revisions(paths)
    folder = model_source(model, paths.model, with_weights=True, trained=config.task in TRAINING_TASKS)
    return config.model_copy(
        update={"model": model.model_copy(update={"name": None, "revision": None, "path": folder})}
    )


def settings_from_config(config: InferenceConfig, *, api_key: str) -> InferenceSettings:
    """Return the settings of an engine for this run; raises `SettingsError` for invalid values."""
    paths, model = RunPaths(Path(config.output_dir)), config.model
    lora = config.lora if config.lora is not None and config.lora.served_as_adapter else None
    runs = lora.slots if lora is not None else 1
    return InferenceSettings(
        model_path=model.source(paths.model),
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
        extra_args=tuple(config.extra_args),
    )
