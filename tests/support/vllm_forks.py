"""One process per test session that has imported vLLM, for programs that need it (see `forks`)."""

from __future__ import annotations

import atexit
import functools

from tests.support.forks import Forks

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the requesting process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Variables read at imports; equal to those of an engine with a tiny model on the CPU
(`rlrun.inference.engine_settings`)."""
MODULES = (
    "uvloop",
    "vllm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.launcher",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "rlrun.inference.http.generate",
    "rlrun.inference.http.routes",
    "rlrun.inference.weights.incoming",
)


@functools.cache
def vllm_forks() -> Forks:
    """Return the process; it starts at the first call and ends with the session."""
    forks = Forks(MODULES, ENVIRONMENT)
    atexit.register(forks.close)
    return forks
