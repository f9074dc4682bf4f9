"""W&B's transaction log: blocks of 32 KiB in LevelDB's log format, whose records are the library's own protobuf messages.

The library has a writer and a synchroniser, but no reader for programs. After a kill the file's end may be torn: reading stops there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 32768
_PREAMBLE = 7
"""Bytes before the first record: the format's name and version."""
_HEADER = 7
"""Bytes before a fragment: checksum (4), length (2), type (1)."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_messages(content: bytes) -> Iterator[bytes]:
    """Whole records of a log's content, in order."""
    position, parts = _PREAMBLE, list[bytes]()
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # padding
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind, end = content[position + 6], position + _HEADER + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or end > len(content):
            return
        parts.append(content[position + _HEADER : end])
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
        position = end


def read_history(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Rows of a run's history in a log: number, and values by name."""
    from wandb.proto import wandb_internal_pb2

    for message in read_messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield int(record.history.step.num), row


def rows_of(paths: Iterable[Path], *, limit: int) -> int:
    """Rows from 0 that the logs have without a gap; at most `limit`."""
    if not limit:
        return 0
    found = {number for path in paths for number, _ in read_history(path)}
    return next((number for number in range(limit) if number not in found), limit)
