"""Failure reasons from the output of ended processes, as torch, torchrun, NCCL and Python write it."""

from __future__ import annotations

import pytest

from rlrun.diagnostics.symptoms import LOOKED_AT, symptom_of, tag_message, tag_of
from rlrun.pod.container import MAX_BYTES, failure_text
from rlrun.protocol.files.failures import telling_lines
from tests.unit.inspect.explained import ENGINE

SITE = "/opt/venv/lib/python3.11/site-packages"
TORCHRUN = f"""\
E1121 10:00:03.120000 7 {SITE}/torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 33)
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "{SITE}/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
rlrun.trainer FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_10:00:03
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 33)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
OOM = f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "{SITE}/rlrun/trainer/steps.py", line 88, in train_step
[rank0]:     loss.backward()
[rank0]:   File "{SITE}/torch/_tensor.py", line 648, in backward
[rank0]:     torch.autograd.backward(
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB
[rank0]:[W1121 10:00:02.9 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called
"""
PEER = f"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "{SITE}/rlrun/trainer/group.py", line 40, in all_reduce
[rank1]:     dist.all_reduce(tensor)
[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error
[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""
WATCHDOG = """\
[rank3]:[E1121 10:30:00.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn=1) ran for 600032 milliseconds before timing out.
[rank3]:[E1121 10:30:00.2 ProcessGroupNCCL.cpp:1895] Process group watchdog thread terminated with exception: timeout
Fatal: terminate called after throwing an instance of 'c10::DistBackendError'
"""  # noqa: E501
ASSERT = f"""\
/pytorch/aten/cuda/Indexing.cu:1289: block: [5,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
Traceback (most recent call last):
  File "{SITE}/rlrun/trainer/forward.py", line 12, in forward
    hidden = model(tokens)
  File "{SITE}/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
RuntimeError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call
"""
ILLEGAL = "[rank2]:[E1121 ProcessGroupNCCL.cpp:1895] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"  # noqa: E501
USER = f"""\
INFO    | orchestrator | step 3
Traceback (most recent call last):
  File "{SITE}/rlrun/orchestrator/main.py", line 70, in main
    asyncio.run(run())
  File "/usr/lib/python3.11/asyncio/runners.py", line 190, in run
    return runner.run(main)
  File "/work/rewards/mine.py", line 4, in reward
    return table[answer]
KeyError: 'forty-two'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/work/rewards/mine.py", line 6, in reward
    raise ValueError("no such answer") from None
  File "/usr/lib/python3.11/json/decoder.py", line 2, in decode
    pass
ValueError: no such answer
"""
FULL = f"""\
Traceback (most recent call last):
  File "{SITE}/rlrun/trainer/saving.py", line 51, in save
    file.write(data)
OSError: [Errno 28] No space left on device: '/data/run/checkpoints/step_00000010.a0001.tmp/x'
"""
SHM = "RuntimeError: unable to write to file </torch_17_2839_0>: No space left on device (28)\n"
MEMORY = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes.\n"


@pytest.mark.parametrize(
    ("text", "reason", "line", "where"),
    [
        (OOM + PEER + TORCHRUN, "CudaOutOfMemory", "torch.OutOfMemoryError: CUDA out", "rlrun/trainer/steps.py:88 in train_step"),
        (PEER + OOM + TORCHRUN, "CudaOutOfMemory", "torch.OutOfMemoryError: CUDA out", "rlrun/trainer/steps.py:88 in train_step"),
        (PEER + TORCHRUN, "NcclError", "torch.distributed.DistBackendError: NCCL", "rlrun/trainer/group.py:40 in all_reduce"),
        (WATCHDOG, "NcclError", "[E1121 10:30:00.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught", None),
        (PEER + ASSERT, "CudaError", "RuntimeError: CUDA error: device-side", "rlrun/trainer/forward.py:12 in forward"),
        (ILLEGAL, "CudaError", "[E1121 ProcessGroupNCCL", None),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CudaOutOfMemory", "CUBLAS_STATUS_ALLOC", None),
        (FULL + PEER, "StorageError", "OSError: [Errno 28] No space left", "rlrun/trainer/saving.py:51 in save"),
        (ENGINE, None, "RuntimeError: Unsupported CPU attention", "attention/backends/cpu_attn.py:253 in build"),
        (SHM, None, "", None),
        (MEMORY, None, "RuntimeError: [enforce fail at alloc_cpu", None),
        (USER, None, "ValueError: no such answer", "work/rewards/mine.py:6 in reward"),
        (USER + TORCHRUN, None, "ValueError: no such answer", "work/rewards/mine.py:6 in reward"),
        ("INFO | all is well\n", None, "", None),
        ("", None, "", None),
    ],
)  # fmt: skip
def test_most_informative_line_is_selected(text: str, reason: str | None, line: str, where: str | None) -> None:
    found = symptom_of(text)
    if not line:
        assert found is None
        return
    assert found is not None
    assert (found.reason, found.where) == (reason, where)
    assert found.line.startswith(line)


def test_early_error_line_is_not_the_cause() -> None:
    text = "retrying after CUDA error: unknown error\n" + "step\n" * LOOKED_AT + USER
    found = symptom_of(text)
    assert found is not None
    assert (found.reason, found.line) == (None, "ValueError: no such answer")


def test_shown_lines_end_at_cause_not_at_torchrun_table() -> None:
    lines = telling_lines(OOM + TORCHRUN)
    assert "CUDA out of memory" in lines[-1]
    assert "ChildFailedError" not in "\n".join(lines)


def test_long_failure_message_keeps_its_reason_prefix() -> None:
    text = OOM * 30 + TORCHRUN
    message = failure_text(1, said=None, full=None, lines=telling_lines(text), symptom=symptom_of(text))
    first = message.splitlines()[0]
    assert first.startswith("CudaOutOfMemory: ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory.")
    assert "(at rlrun/trainer/steps.py:88 in train_step); its last lines:" in first
    assert len(message.encode()) <= MAX_BYTES
    assert failure_text(1, said="NCCL error: x", full=None, lines=[]) == "NcclError: NCCL error: x"
    assert failure_text(135, said=None, full="/runs/demo", lines=["x"]).startswith("StorageError: was ended by SIGBUS")


def test_message_of_older_release_has_no_reason() -> None:
    assert tag_of(tag_message("CudaError", tag_message("CudaError", "boom"))) == ("CudaError", "boom")
    assert tag_of("ended with exit code 1; its last lines:\nCudaError: x") == (
        None,
        "ended with exit code 1; its last lines:\nCudaError: x",
    )
    assert tag_of("Unknown: x") == (None, "Unknown: x")
