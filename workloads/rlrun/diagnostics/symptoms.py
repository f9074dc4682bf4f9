"""Cause of a process's end in its output: one line, the place in the code, and a word that the failure policy knows. Pure.

The word travels as the first of the termination message (`tag_message`, `tag_of`), so that people and the operator read the same line.
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
"""Reasons that a message may begin with."""
LINE_MAX = 400
LOOKED_AT = 300
"""Lines before the end that count: what was said long before a process ended did not end it."""
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
"""Meaning of a line that matches; the first kind that occurs decides, because the later ones follow from it."""
_AFTERMATH = re.compile(
    r"ChildFailedError|SignalException|EngineDeadError|Engine core (?:initialization|proc \S+) (?:failed|died)|"
    r"DistNetworkError|DistStoreError|Connection (?:closed|reset) by peer|Broken pipe"
)
"""Exceptions of processes that lost a peer, and of torchrun, which reports its children."""
_FRAMES_OF_A_COLLECTIVE = 3
_RANK = re.compile(r"^(\[(?:rank|default)\d+\]|\(\w+ pid=\d+\)):? ?(?:[A-Z]+ [\d-]+ [\d:]+ \[\S+\] ?)?")
"""Mark of a process before each of its lines: torch's of a rank, vLLM's of a process, with its log's time and place."""
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (.+)$')
_TRACEBACK = "Traceback (most recent call last):"
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(?!rlrun)|/lib/python3[.\d]*/(?!(?:site|dist)-packages/)|^<")
_TAG = re.compile(rf"^({'|'.join(REASONS)}): ")


@dataclass(frozen=True)
class Symptom:
    """Most informative line."""

    reason: str | None
    """One of `REASONS`; None: no word for it."""
    line: str
    where: str | None
    """The innermost call in the run's own or the user's code, where the line ends a traceback."""
    index: int
    """Index of the line among those that are not empty."""

    def __str__(self) -> str:
        return self.line if self.where is None else f"{self.line} (at {self.where})"


@dataclass(frozen=True)
class _Raised:
    """A traceback's end."""

    index: int
    line: str
    where: str | None


def symptom_of(text: str) -> Symptom | None:
    """Most informative symptom in a process's output; None: nothing that is recognised."""
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
    """True if a collective raised it."""
    last = traceback.extract_tb(error.__traceback__)[-_FRAMES_OF_A_COLLECTIVE:]
    return isinstance(error, RuntimeError) and any("/torch/distributed/" in frame.filename for frame in last)


def lost_peer(error: BaseException | None) -> bool:
    """True if an error, or a cause of it, is a lost connection to another rank: that one has ended, and may have reported why."""
    return error is not None and (
        between_ranks(error)
        or _AFTERMATH.search(str(error)) is not None
        or lost_peer(error.__cause__ or error.__context__)
    )


def tag_message(reason: str | None, message: str) -> str:
    """The message with its reason in front, once."""
    return message if reason is None or _TAG.match(message) else f"{reason}: {message}"


def tag_of(message: str) -> tuple[str | None, str]:
    """The reason in front of a message, and the rest; messages of older releases have none."""
    found = _TAG.match(message)
    return (found.group(1), message[found.end() :]) if found is not None else (None, message)


def _traceback_ends(lines: Sequence[str]) -> Iterator[_Raised]:
    """The ends of Python's tracebacks, in order. Ranks of a group print at the same time; torch puts the rank before each line."""
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
    """The innermost frame that is not a library's; where all are: the innermost."""
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
