"""Ten recorded broken runs, as local folders and as cluster objects, for the page of `rlrun why` outputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlrun.inspect.cluster_reader import run_snapshot
from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.screen import explanation_text
from rlrun.inspect.why import explain_run
from rlrun.orchestrator.rollouts.dispatcher import ErrorBudget
from rlrun.runtime import exit_codes
from tests.unit.inspect.broken import BROKEN, NOW
from tests.unit.inspect.test_folder_commands import PROGRESS, Folder

SITE = "/venv/lib/python3.11/site-packages"
_MARK = "(EngineCore pid=4712) ERROR 11-26 03:14:24 [core.py:1512]"
ENGINE = f"""\
{_MARK} EngineCore encountered a fatal error.
{_MARK} Traceback (most recent call last):
{_MARK}   File "{SITE}/vllm/v1/engine/core.py", line 1503, in run_engine_core
{_MARK}     engine_core.run_busy_loop()
{_MARK}   File "{SITE}/vllm/v1/attention/backends/cpu_attn.py", line 253, in build
{_MARK}     scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
{_MARK} RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0
(MainProcess pid=4711) ERROR 11-26 03:14:24 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=4711) ERROR 11-26 03:14:24 [async_llm.py:906]   File "{SITE}/vllm/v1/engine/async_llm.py", line 849, in output_handler
(MainProcess pid=4711) ERROR 11-26 03:14:24 [async_llm.py:906]     outputs = await engine_core.get_output_async()
(MainProcess pid=4711) ERROR 11-26 03:14:24 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered \
an issue. See stack trace (above) for the root cause.
Traceback (most recent call last):
  File "{SITE}/rlrun/inference/engine_server.py", line 261, in _warm_up
    async for _ in engine.generate(prompt, sampling, "rlrun-warm-up"):
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""
MEMORY = f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "{SITE}/rlrun/trainer/learning/gradient_accumulation.py", line 88, in accumulate
[rank0]:     loss.backward()
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB
E1126 03:14:25 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0 (pid: 4720)
"""


def _failed(folder: Folder, role: str, code: int) -> None:
    folder.record(state="Failed", failed_role=role, exit_code=code, time=NOW - 60)


def _reported(folder: Folder, role: str, code: int, message: str) -> None:
    file = folder.write(f"logs/attempt_0001/{role}/error.json", {"message": message, "exit_code": code, "role": role})
    os.utime(file, (NOW - 60, NOW - 60))
    _failed(folder, role, code)


def engine(folder: Folder) -> None:
    """Engine that does not support the model."""
    folder.write("logs/attempt_0001/inference/inference.log", ENGINE)
    _failed(folder, "inference", 1)


def gpu_memory(folder: Folder) -> None:
    """Trainer that runs out of GPU memory."""
    folder.train(3)
    folder.write("logs/attempt_0001/trainer/trainer.log", MEMORY)
    _failed(folder, "trainer", 1)


def killed(folder: Folder) -> None:
    """Rank that the kernel killed."""
    folder.train(3)
    _reported(folder, "trainer", 137, "rank 0 was ended by SIGKILL (often for lack of memory)")


def reward(folder: Folder) -> None:
    """Reward function that raises an error."""
    budget = ErrorBudget(0.5, 4)
    message = None
    while message is None:
        message = budget.record("maths", "KeyError: 'answer' (at rewards.py:12 in exact)")
    _reported(folder, "orchestrator", exit_codes.DATA, message)


def full(folder: Folder) -> None:
    """Full volume."""
    folder.train(3)
    trouble = {
        "reason": "StorageFull",
        "text": "traces/step_00000004.jsonl: No space left on device: 0 B free of 10 GiB",
    }
    folder.record(time=NOW, progress=PROGRESS | {"storage": trouble, "waiting_since": NOW - 5}, progress_time=NOW - 1)


def gone(folder: Folder) -> None:
    """Machine that was restarted."""
    folder.train(3)
    folder.record(host="worker", pid=4711, time=NOW - 3600)


class Case(NamedTuple):
    """One broken run."""

    done: str
    """How the run was broken."""
    make: Callable[[Folder], None] | str
    """Function that writes the folder, or a key of `BROKEN`."""
    cause: str
    """Words that name the cause."""
    remedy: str
    """Words that name the fix."""


CASES = {
    "The engine cannot compute the model": Case(
        "A model whose heads have a size that vLLM has no kernel for.", engine, "head_dim=16", "--role inference"
    ),
    "The trainer's GPU is too small": Case(
        "Micro-batches too long for 80 GB.", gpu_memory, "CUDA out of memory", "Decrease trainer.microBatchTokens"
    ),
    "The kernel killed a rank": Case(
        "A process that took the machine's memory, beside the trainer.", killed, "lack of memory", "`dmesg`"
    ),
    "A reward function raises": Case(
        "A function that reads a field which the rows do not have.", reward, "KeyError: 'answer'", "environments"
    ),
    "The disk is full": Case("A volume of 10 GiB, filled.", full, "No space left on device", "Free space"),
    "The machine was restarted": Case("`kill -9` of the launcher.", gone, "LauncherGone", "--resume"),
    "No free GPUs": Case("More nodes asked for than are free.", "no free GPUs", "1 qualifies", "request less"),
    "A wrong image": Case(
        "A tag that the registry does not have.", "wrong image", "cannot pull image", "Correct `image`"
    ),
    "Too little memory of a container": Case(
        "A limit below what the orchestrator needs.",
        "host memory",
        "used more than 64Gi",
        "Increase orchestrator.resources.limits.memory",
    ),
    "An environment hangs": Case(
        "An environment that waits for a server without a time limit.",
        "a hanging environment",
        "rollouts for step 8",
        "stacks",
    ),
}


def told(case: Case, root: Path) -> str:
    """Return the output of `rlrun why`. Args: root: folder `runs/a` below the working directory; it must not exist yet."""
    if isinstance(case.make, str):
        seen = run_snapshot(BROKEN[case.make][0], now=NOW)
    else:
        case.make(folder := Folder(root))
        seen = read_folder(folder.root, NOW)
    return explanation_text(explain_run(seen, NOW), NOW)
