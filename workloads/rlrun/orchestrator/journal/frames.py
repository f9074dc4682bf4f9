"""Byte format of the journal: frames with a checksum each, so that a reader detects the record at which a killed writer
stopped.

A frame is `length crc32 kind group member payload`, little-endian; the checksum covers the bytes after it. A rollout's
payload is a JSON document followed by the columns of its sequences, end to end, as in memory: the bits read equal the
bits written.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlrun.orchestrator.types import Recorded, Rollout

FORMAT_VERSION = 1
_START = struct.Struct("<II")
"""Length of the payload, checksum."""
_KEY = struct.Struct("<Bqi")
"""Kind, group, member."""
_LENGTH = struct.Struct("<I")
_HEAD, _ROLLOUT, _DROPPED = 1, 2, 3
_COLUMNS = {"input_ids": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}


class FormatError(ValueError):
    """Complete record of an unsupported format."""


@dataclass(frozen=True)
class Head:
    """First record of a file."""

    fingerprint: str
    """Fingerprint of the settings of the rollouts. Rollouts with another fingerprint are unusable."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class RolloutEntry:
    """Finished member of a group."""

    group: int
    member: int
    """Index within the group."""
    environment: str
    task: int
    """Index in the environment's train split."""
    dispatch_version: int
    temperature: float
    rollout: Rollout

    @property
    def newest_version(self) -> int:
        """Newest policy version that sampled one of its tokens."""
        return max(int(sequence.versions.max()) for sequence in self.rollout.sequences)


@dataclass(frozen=True)
class DroppedEntry:
    """Group that was dropped, so that no later attempt plays it again."""

    group: int
    reason: str
    mean_reward: float | None
    """Mean reward of the group; None if it failed."""
    next_group: int
    """Lowest undispatched group number at that moment."""
    newest_version: int
    """Newest policy version that is known to have sampled a part of the group."""


Entry = RolloutEntry | DroppedEntry

_HEAD_KEYS = frozenset(known.name for known in fields(Head))
_DROPPED_KEYS = frozenset(known.name for known in fields(DroppedEntry))
_ENTRY_KEYS = frozenset(known.name for known in fields(RolloutEntry)) - {"group", "member", "rollout"}
_ELSEWHERE = {"sequences", "tools"}
"""Fields of a rollout stored as columns (`sequences`), or needed only by `synthesize` (`tools`), which has no journal.
"""
_ROLLOUT_KEYS = _ENTRY_KEYS | {known.name for known in fields(Rollout)} - _ELSEWHERE | {"lengths"}


def encode_head(head: Head) -> bytes:
    """Return the frame at the start of a file."""
    return _frame_record(_HEAD, -1, -1, json.dumps(vars(head)).encode())


def encode_entry(entry: Entry) -> bytes:
    """Return the frame of an entry."""
    if isinstance(entry, DroppedEntry):
        return _frame_record(_DROPPED, entry.group, -1, json.dumps(vars(entry)).encode())
    rollout = entry.rollout
    document = {
        "environment": entry.environment,
        "task": entry.task,
        "dispatch_version": entry.dispatch_version,
        "temperature": entry.temperature,
        "lengths": [len(sequence.input_ids) for sequence in rollout.sequences],
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "messages": rollout.messages,
        "texts": rollout.texts,
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "seconds": rollout.seconds,
        "task_id": rollout.task_id,
    }
    text = json.dumps(document, separators=(",", ":"), default=str).encode()
    columns = [
        np.ascontiguousarray(getattr(sequence, name), kind).tobytes()
        for sequence in rollout.sequences
        for name, kind in _COLUMNS.items()
    ]
    return _frame_record(_ROLLOUT, entry.group, entry.member, b"".join([_LENGTH.pack(len(text)), text, *columns]))


def _frame_record(kind: int, group: int, member: int, payload: bytes) -> bytes:
    key = _KEY.pack(kind, group, member)
    return _START.pack(len(payload), zlib.crc32(payload, zlib.crc32(key))) + key + payload


@dataclass(frozen=True)
class Foreign:
    """Complete but unreadable record."""

    group: int
    member: int
    """Index of the rollout in the group; -1 if the record does not belong to a single rollout."""
    reason: str


@dataclass
class Content:
    """Content of a journal file."""

    head: Head | None
    """First record. None if it is incomplete or unreadable."""
    entries: list[Entry]
    torn: int = 0
    """Bytes after the last complete record."""
    foreign: list[Foreign] = field(default_factory=list)
    """Complete records of another format. If the head has another format, this contains all records."""


def read_segment(path: Path) -> Content:
    """Read all complete records of a file, in order, up to the first torn or damaged record.

    Raises:
        OSError: the file is unreadable.
    """
    data = memoryview(path.read_bytes())
    content = Content(None, [])
    place, first = 0, _START.size + _KEY.size
    while place + first <= len(data):
        length, checksum = _START.unpack_from(data, place)
        end = place + first + length
        if end > len(data) or zlib.crc32(data[place + _START.size : end]) != checksum:
            break
        kind, group, member = _KEY.unpack_from(data, place + _START.size)
        try:
            _take_record(content, kind, group, member, data[place + first : end])
        except Exception as error:  # any exception is possible, depending on the content of the file
            content.foreign.append(Foreign(group, member, str(error) or type(error).__name__))
        place = end
    content.torn = len(data) - place
    return content


def _take_record(content: Content, kind: int, group: int, member: int, payload: memoryview) -> None:
    """Add a record to the content.

    Raises:
        FormatError: the record has another format.
    """
    if content.head is None:
        if content.foreign:
            raise FormatError(content.foreign[0].reason)
        content.head = _read_head(kind, payload)
    elif kind == _ROLLOUT:
        content.entries.append(_read_rollout(group, member, payload))
    elif kind == _DROPPED:
        content.entries.append(DroppedEntry(**_read_document(payload, _DROPPED_KEYS)))
    else:
        raise FormatError(f"a record has kind {kind}; this version reads the kinds {_ROLLOUT} and {_DROPPED}")


def _read_document(payload: memoryview, keys: frozenset[str]) -> dict[str, Any]:
    """Read a record's JSON document, which must have exactly these keys."""
    try:
        document = json.loads(bytes(payload))
    except ValueError:
        raise FormatError("a record is not a JSON document") from None
    if not isinstance(document, dict):
        raise FormatError("a record is not a JSON object")
    if differing := sorted(keys ^ document.keys()):
        has = "the unknown" if differing[0] in document else "no"
        raise FormatError(f"a record has {has} key {differing[0]!r}")
    return document


def _read_head(kind: int, payload: memoryview) -> Head:
    if kind != _HEAD:
        raise FormatError(f"its first record has kind {kind}, not {_HEAD}")
    head = Head(**_read_document(payload, _HEAD_KEYS))
    if head.format_version != FORMAT_VERSION:
        raise FormatError(f"it has format version {head.format_version}; this version reads {FORMAT_VERSION}")
    return head


def _read_rollout(group: int, member: int, payload: memoryview) -> RolloutEntry:
    if len(payload) < _LENGTH.size:
        raise FormatError("a rollout's record is too short")
    (length,) = _LENGTH.unpack_from(payload)
    place = _LENGTH.size + length
    document = _read_document(payload[_LENGTH.size : place], _ROLLOUT_KEYS)
    columns_bytes = sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
    if place + sum(document["lengths"]) * columns_bytes != len(payload):
        raise FormatError("the columns of a rollout do not match its lengths")
    sequences = []
    for tokens in document.pop("lengths"):
        columns: dict[str, Any] = {}
        for name, kind in _COLUMNS.items():
            size = tokens * np.dtype(kind).itemsize
            columns[name] = np.frombuffer(payload[place : place + size], kind).copy()
            place += size
        sequences.append(Recorded(**columns))
    own = {name: document.pop(name) for name in _ENTRY_KEYS}
    messages, texts = tuple(document.pop("messages")), tuple(document.pop("texts"))
    return RolloutEntry(
        group, member, **own, rollout=Rollout(tuple(sequences), messages=messages, texts=texts, **document)
    )


def groups_of(path: Path) -> set[int]:
    """Return the group numbers in a file, read only from the keys of its frames.

    Raises:
        OSError: the file is unreadable.
    """
    with path.open("rb") as file:
        return set(_read_groups(file))


def _read_groups(file: BinaryIO) -> Iterator[int]:
    while len(start := file.read(_START.size + _KEY.size)) == _START.size + _KEY.size:
        length, _ = _START.unpack_from(start)
        kind, group, _ = _KEY.unpack_from(start, _START.size)
        if kind not in (_HEAD, _ROLLOUT, _DROPPED):
            return
        if kind != _HEAD:
            yield group
        file.seek(length, 1)
