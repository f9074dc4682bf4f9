"""vLLM's command line and environment as pure functions of the settings."""

from __future__ import annotations

from rlrun.inference.settings import LORA_RANKS, InferenceSettings

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than the client keeps them, so that it never writes to one that is being closed."""

WORKER_EXTENSION = "rlrun.inference.weights.loading.Loading"
"""Class whose methods vLLM's workers get."""
ENGINE_VARIABLE = "RLRUN_ENGINE"
"""Environment variable of the processes of a run's engine; our plugin leaves other servers alone."""
MAX_LORAS = 4
"""Adapters of each run in one engine step: requests of this many versions are computed together, those of others wait."""
MAX_LOADED_LORAS = 32
"""Adapters of each run that an engine remembers. One that requests in flight need must not be forgotten, see `lora_adapters`."""


def vllm_arguments(settings: InferenceSettings) -> list[str]:
    """Arguments of vLLM's OpenAI server. The key is not among them: arguments are visible to every user in `ps`."""
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
        # Tokens in, tokens out, with log-probs and versions.
        "--enable-scale-out",
        # Log-probs of what was sampled from: after temperature and top-p.
        "--logprobs-mode=processed_logprobs",
        "--enable-prefix-caching",
        # No pickled checkpoint is ever read.
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
    """Variables that must be set before vLLM is imported; they win over inherited ones."""
    environment = {
        # Our router calls the engine directly, so vLLM's raw development routes need not exist at all.
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
        # The pool that sleeps cannot have segments that grow; they are set for the trainer beside it.
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
            # vLLM compiles two small sampling functions even when set to be eager; on CPU that costs the first
            # request 15 s of a C++ compiler and gains nothing.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if settings.tensor_parallel == 1:
            # Keeps the only worker inside the engine's process: a third less time to start and 1 GB less memory. vLLM
            # insists on a process per worker because it binds threads to cores per worker; `nobind` does without.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment
