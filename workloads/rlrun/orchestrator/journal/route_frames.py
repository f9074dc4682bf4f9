"""Routes of finished rollouts, in a second file next to each file of the journal.

Routes have up to 30 times the bytes of a rollout, and a rollout without them is still usable: the trainer routes its tokens natively and
counts them. The file is therefore not flushed to the disk with the journal, and a damaged or missing record only costs routes.

A record is `length crc32 group member payload`, little-endian; the checksum covers the bytes after it. The payload is a packed document
(`protocol.messages.packed_columns`) with one raw column per sequence that has routes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlrun.orchestrator.journal.frames import Entry, RolloutEntry
from rlrun.orchestrator.types import Recorded
from rlrun.protocol.files.routes import (
    Routes,
    RoutesError,
    check_column,
    describe_routes,
    described_size,
    read_routes,
    routes_bytes,
)
from rlrun.protocol.messages.packed_columns import PackedError, Reader, pack_document

_START = struct.Struct("<QI")
"""Length of the payload, checksum."""
_KEY = struct.Struct("<qi")
"""Group, member."""
Member = tuple[int, int]
"""Group number and index in the group."""


def encode_routes(entry: Entry) -> bytes:
    """Return the record of a rollout's routes; empty for an entry without routes."""
    if not isinstance(entry, RolloutEntry):
        return b""
    columns = [sequence.routes for sequence in entry.rollout.sequences]
    if all(column is None for column in columns):
        return b""
    described = [None if column is None else describe_routes(column) for column in columns]
    payload = pack_document({"sequences": described}, [routes_bytes(one) for one in columns if one is not None])
    key = _KEY.pack(entry.group, entry.member)
    return _START.pack(len(payload), zlib.crc32(payload, zlib.crc32(key))) + key + payload


def read_route_file(path: Path) -> dict[Member, tuple[Routes | None, ...]]:
    """Return the routes of each rollout in a file, by sequence, up to the first torn or damaged record; empty without a file.

    Raises:
        OSError: the file is unreadable.
    """
    if not path.exists():
        return {}
    data, place = memoryview(path.read_bytes()), 0
    found: dict[Member, tuple[Routes | None, ...]] = {}
    first = _START.size + _KEY.size
    while place + first <= len(data):
        length, checksum = _START.unpack_from(data, place)
        end = place + first + length
        if end > len(data) or zlib.crc32(data[place + _START.size : end]) != checksum:
            break
        group, member = _KEY.unpack_from(data, place + _START.size)
        try:
            found[group, member] = _read_payload(bytes(data[place + first : end]))
        except (PackedError, RoutesError, KeyError, TypeError, AttributeError):
            break
        place = end
    return found


def _read_payload(payload: bytes) -> tuple[Routes | None, ...]:
    reader = Reader(payload)
    return tuple(
        None if described is None else read_routes(described, reader.raw(described_size(described)))
        for described in reader.head["sequences"]
    )


def attach_routes(entries: Sequence[Entry], routes: Mapping[Member, Sequence[Routes | None]]) -> list[Entry]:
    """Return the entries of a journal file with their routes; routes that do not fit the tokens of their sequence are left out."""
    found: list[Entry] = []
    for entry in entries:
        columns = routes.get((entry.group, entry.member)) if isinstance(entry, RolloutEntry) else None
        if isinstance(entry, RolloutEntry) and columns is not None and len(columns) == len(entry.rollout.sequences):
            sequences = tuple(map(_with_routes, entry.rollout.sequences, columns))
            entry = replace(entry, rollout=replace(entry.rollout, sequences=sequences))
        found.append(entry)
    return found


def _with_routes(sequence: Recorded, routes: Routes | None) -> Recorded:
    if routes is None:
        return sequence
    try:
        check_column(routes, len(sequence.input_ids))
    except RoutesError:
        return sequence
    return replace(sequence, routes=routes)
