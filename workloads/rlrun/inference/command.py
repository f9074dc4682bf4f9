"""Command line and environment of vLLM, computed from the settings without side effects."""

from __future__ import annotations

from rlrun.inference.settings import LORA_RANKS, InferenceSettings

KEEP_ALIVE_SECONDS = 75
"""Seconds for which idle connections stay open: longer than the client keeps them, so it never writes to a closing connection."""

WORKER_EXTENSION = "rlrun.inference.weights.loading.Loading"
"""Class whose methods vLLM adds to its workers."""
ENGINE_VARIABLE = "RLRUN_ENGINE"
"""Environment variable of the processes of a run's engine; RLRun's vLLM plugin does nothing without it."""
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
