"""Reader of W&B's transaction log: blocks of 32 KiB in LevelDB's log format with the library's protobuf messages.

The library has a writer and a synchronizer, but no public reader. After a kill the end of the file may be torn; reading stops there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 32768
_PREAMBLE = 7
"""Size of the format's name and version at the start of the file, in bytes."""
_HEADER = 7
"""Size of a fragment's header in bytes: checksum (4), length (2), type (1)."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_messages(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a log, in order."""
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
    """Yield the rows of a run's history in a log: number, and values by name."""
    from wandb.proto import wandb_internal_pb2

    for message in read_messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield int(record.history.step.num), row


def rows_of(paths: Iterable[Path], *, limit: int) -> int:
    """Return the number of rows that the logs contain from row 0 without a gap, at most `limit`."""
    if not limit:
        return 0
    found = {number for path in paths for number, _ in read_history(path)}
    return next((number for number in range(limit) if number not in found), limit)
