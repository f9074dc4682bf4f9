"""Cause of a process's end in its output: one line, its position in the code, and a reason for the failure policy. Pure.

The reason is the first word of the termination message (`tag_message`, `tag_of`), so that users and the operator read the same line.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CUDA_OUT_OF_MEMORY = "CudaOutOfMemory"
CUDA_ERROR = "CudaError"
NCCL_ERROR = "NcclError"
STORAGE_ERROR = "StorageError"
REASONS = (CUDA_OUT_OF_MEMORY, STORAGE_ERROR, CUDA_ERROR, NCCL_ERROR)
"""Reasons at the start of a message."""
LINE_MAX = 400
LOOKED_AT = 300
"""Number of lines at the end that are searched. Earlier lines are not the cause of the end."""
_SHARED_MEMORY = re.compile(r"/dev/shm|</?torch_\d")
_TELLING: tuple[tuple[str | None, re.Pattern[str]], ...] = (
    (
        CUDA_OUT_OF_MEMORY,
        re.compile(
            r"CUDA out of memory|CUDA error: out of memory|Cuda failure (?:2 )?'out of memory'|"
            r"cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
        ),
    ),
    (
        STORAGE_ERROR,
        re.compile(
            r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|Stale (?:NFS )?file handle"
        ),
    ),
    (
        CUDA_ERROR,
        re.compile(
            r"CUDA error:|CUDA driver error:|\bcudaError[A-Z]\w+|CUBLAS_STATUS_[A-Z]+|CUDNN_STATUS_[A-Z]+|"
            r"device-side assert triggered|uncorrectable ECC|Cuda failure \d* ?'"
        ),
    ),
    (
        NCCL_ERROR,
        re.compile(
            r"NCCL error|DistBackendError|Watchdog caught collective operation timeout|"
            r"nccl(?:UnhandledCuda|System|Internal|Remote)Error"
        ),
    ),
    (
        None,
        re.compile(r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|std::bad_alloc"),
    ),
)
"""Reasons by patterns of lines. The first reason with a matching line is used, because later ones are usually consequences of it."""
_AFTERMATH = re.compile(
    r"ChildFailedError|SignalException|EngineDeadError|Engine core (?:initialization|proc \S+) (?:failed|died)|"
    r"DistNetworkError|DistStoreError|Connection (?:closed|reset) by peer|Broken pipe"
)
"""Exceptions of processes that lost a peer, and of torchrun, which reports its children. They are consequences, not causes."""
_FRAMES_OF_A_COLLECTIVE = 3
_RANK = re.compile(r"^(\[(?:rank|default)\d+\]|\(\w+ pid=\d+\)):? ?(?:[A-Z]+ [\d-]+ [\d:]+ \[\S+\] ?)?")
"""Prefix of a process's lines: torch's for a rank, vLLM's for a process, with the time and place of its log."""
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (.+)$')
_TRACEBACK = "Traceback (most recent call last):"
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(?!rlrun)|/lib/python3[.\d]*/(?!(?:site|dist)-packages/)|^<")
_TAG = re.compile(rf"^({'|'.join(REASONS)}): ")


@dataclass(frozen=True)
class Symptom:
    """Most informative line of an output."""

    reason: str | None
    """One of `REASONS`, or None if no reason matches."""
    line: str
    where: str | None
    """Innermost call in RLRun's or the user's code, if the line ends a traceback."""
    index: int
    """Index of the line among the non-empty lines."""

    def __str__(self) -> str:
        return self.line if self.where is None else f"{self.line} (at {self.where})"


@dataclass(frozen=True)
class _Raised:
    """Last line of a traceback."""

    index: int
    line: str
    where: str | None


def symptom_of(text: str) -> Symptom | None:
    """Return the most informative symptom in a process's output, or None if no pattern matches."""
    every = [line for line in text.splitlines() if line.strip()]
    old = max(0, len(every) - LOOKED_AT)
    lines = every[old:]
    raised = list(_traceback_ends(lines))
    for reason, pattern in _TELLING:
        for i, line in enumerate(lines):
            if pattern.search(line) and not (reason == STORAGE_ERROR and _SHARED_MEMORY.search(line)):
                own = next((end.where for end in raised if end.index == i), None)
                return Symptom(reason, _show_frame(line), own, old + i)
    causes = [end for end in raised if not _AFTERMATH.search(end.line)] or raised
    if not causes:
        return None
    last = causes[-1]
    return Symptom(None, _show_frame(last.line), last.where, old + last.index)


def between_ranks(error: BaseException) -> bool:
    """Return whether a collective operation raised the error."""
    last = traceback.extract_tb(error.__traceback__)[-_FRAMES_OF_A_COLLECTIVE:]
    return isinstance(error, RuntimeError) and any("/torch/distributed/" in frame.filename for frame in last)


def lost_peer(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lost connection to another rank, which has ended and may report the reason."""
    return error is not None and (
        between_ranks(error)
        or _AFTERMATH.search(str(error)) is not None
        or lost_peer(error.__cause__ or error.__context__)
    )


def tag_message(reason: str | None, message: str) -> str:
    """Return the message with its reason in front. A reason that is already there is not repeated."""
    return message if reason is None or _TAG.match(message) else f"{reason}: {message}"


def tag_of(message: str) -> tuple[str | None, str]:
    """Split a message into the reason in front and the rest. Messages of older releases have no reason."""
    found = _TAG.match(message)
    return (found.group(1), message[found.end() :]) if found is not None else (None, message)


def _traceback_ends(lines: Sequence[str]) -> Iterator[_Raised]:
    """Yield the last lines of Python's tracebacks, in order. Ranks print at the same time; torch puts the rank before each line."""
    open_: dict[str, list[tuple[str, str, str]]] = {}
    for i, line in enumerate(lines):
        prefix = found.group(1) if (found := _RANK.match(line)) is not None else ""
        rest = line[found.end() :] if found is not None else line
        if rest.startswith(_TRACEBACK):
            open_[prefix] = []
        elif prefix in open_ and (frame := _FRAME.match(rest)) is not None:
            open_[prefix].append((frame.group(1), frame.group(2), frame.group(3)))
        elif prefix in open_ and rest and not rest[0].isspace():
            yield _Raised(i, rest, _innermost_frame(open_.pop(prefix)))


def _innermost_frame(frames: Sequence[tuple[str, str, str]]) -> str | None:
    """The innermost frame outside of libraries, or else the innermost frame."""
    mine = [frame for frame in frames if not _LIBRARY.search(frame[0])] or list(frames)
    if not mine:
        return None
    path, line, function = mine[-1]
    parts = path.split("/")
    return f"{'/'.join(parts[-3:])}:{line} in {function}"


def _show_frame(line: str) -> str:
    found = _RANK.match(line)
    text = (line[found.end() :] if found is not None else line).strip()
    return text if len(text) <= LINE_MAX else text[: LINE_MAX - 1] + "…"
