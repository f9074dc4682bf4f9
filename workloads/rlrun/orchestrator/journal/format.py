"""Byte format of the journal: frames with a checksum each, so that a reader knows where a killed writer stopped.

A frame is `length crc32 kind group member payload`, little-endian; the checksum is over all that follows it. A rollout's payload is a
JSON document, then the columns of its sequences, end to end, as they are in memory: what is read is bit for bit what was written.
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
    """A whole record that another version of the software wrote: what it holds is not what this one reads."""


@dataclass(frozen=True)
class Head:
    """The first record of a file."""

    fingerprint: str
    """Fingerprint of what the rollouts were made with; those of another one are of no use."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class RolloutEntry:
    """A finished member of a group."""

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
        """The newest policy version that sampled one of its tokens."""
        return max(int(sequence.versions.max()) for sequence in self.rollout.sequences)


@dataclass(frozen=True)
class DroppedEntry:
    """A group that was given up, so that no later attempt plays it again."""

    group: int
    reason: str
    mean_reward: float | None
    """None when it failed."""
    next_group: int
    """The lowest number that was not dispatched then."""
    newest_version: int
    """The newest policy version that is known to have had a part in it."""


Entry = RolloutEntry | DroppedEntry

_HEAD_KEYS = frozenset(known.name for known in fields(Head))
_DROPPED_KEYS = frozenset(known.name for known in fields(DroppedEntry))
_ENTRY_KEYS = frozenset(known.name for known in fields(RolloutEntry)) - {"group", "member", "rollout"}
_ELSEWHERE = {"sequences", "tools"}
"""Fields of a rollout that are columns of their own, or that only `synthesize` reads, which has no journal."""
_ROLLOUT_KEYS = _ENTRY_KEYS | {known.name for known in fields(Rollout)} - _ELSEWHERE | {"lengths"}


def encode_head(head: Head) -> bytes:
    """The frame that begins a file."""
    return _frame_record(_HEAD, -1, -1, json.dumps(vars(head)).encode())


def encode_entry(entry: Entry) -> bytes:
    """An entry's frame."""
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
    """A whole record that cannot be read."""

    group: int
    member: int
    """Rollout's index in the group; -1 where the record is of no single rollout."""
    reason: str


@dataclass
class Content:
    """Content of a file."""

    head: Head | None
    """None: its first record is not whole or cannot be read."""
    entries: list[Entry]
    torn: int = 0
    """Bytes after the last whole record."""
    foreign: list[Foreign] = field(default_factory=list)
    """Whole records of another format; those of a file whose head is of another one are all of another one."""


def read_segment(path: Path) -> Content:
    """All whole records of a file, in order; what follows a torn or damaged one is left out.

    Raises:
        OSError: the file cannot be read.
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
        except Exception as error:  # of any kind: the file chooses
            content.foreign.append(Foreign(group, member, str(error) or type(error).__name__))
        place = end
    content.torn = len(data) - place
    return content


def _take_record(content: Content, kind: int, group: int, member: int, payload: memoryview) -> None:
    """Add a record to what is read.

    Raises:
        FormatError: it is of another format.
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
        raise FormatError(f"a record is of kind {kind}, this version knows {_ROLLOUT} and {_DROPPED}")


def _read_document(payload: memoryview, keys: frozenset[str]) -> dict[str, Any]:
    """A record's JSON document, which has these keys and no others."""
    try:
        document = json.loads(bytes(payload))
    except ValueError:
        raise FormatError("a record is no JSON document") from None
    if not isinstance(document, dict):
        raise FormatError("a record is no JSON document of keys and values")
    if differing := sorted(keys ^ document.keys()):
        has = "an unknown" if differing[0] in document else "no"
        raise FormatError(f"a record has {has} key {differing[0]!r}")
    return document


def _read_head(kind: int, payload: memoryview) -> Head:
    if kind != _HEAD:
        raise FormatError(f"it begins with a record of kind {kind}, not {_HEAD}")
    head = Head(**_read_document(payload, _HEAD_KEYS))
    if head.format_version != FORMAT_VERSION:
        raise FormatError(f"it has the format version {head.format_version}, this version reads {FORMAT_VERSION}")
    return head


def _read_rollout(group: int, member: int, payload: memoryview) -> RolloutEntry:
    if len(payload) < _LENGTH.size:
        raise FormatError("a rollout's record is too short")
    (length,) = _LENGTH.unpack_from(payload)
    place = _LENGTH.size + length
    document = _read_document(payload[_LENGTH.size : place], _ROLLOUT_KEYS)
    columns_bytes = sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
    if place + sum(document["lengths"]) * columns_bytes != len(payload):
        raise FormatError("a rollout's columns are not those of its lengths")
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
    """Groups in a file, from its frames' keys alone.

    Raises:
        OSError: the file cannot be read.
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
