"""Differences of a version's buckets from those of the version before, as they travel: over the network, or in files on the volume."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from rlrun.protocol.messages.sparse import Bytes, encode

WORTH = 0.5
"""Largest part of a bucket, and of a version, that a difference may have; beyond that it is whole."""
THREADS = 4


@dataclass(frozen=True)
class Part:
    """A rank's buckets of a version, by index."""

    checksums: Mapping[int, int]
    """CRC-32 of each."""
    compared: bool
    """There is a version before, of the same layout."""
    travels: Mapping[int, Bytes]
    """Bytes for those who have that version: a difference, nothing (unchanged), or the bucket itself. Empty if nothing is compared."""

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each in `travels`."""
        return {index: len(content) for index, content in self.travels.items()}


def compare(new: Mapping[int, Tensor], base: Mapping[int, Tensor] | None) -> Part:
    """Checksums of a version's buckets and, with a version before, what differs from it.

    Args:
        new: uint8 in host memory, by index.
        base: the version before; None, or another layout: there are no differences.
    """
    if base is not None and _sizes(base) != _sizes(new):
        base = None

    def one(index: int) -> tuple[int, Bytes | None]:
        body: Bytes = new[index].numpy()
        found = zlib.crc32(body)
        if base is None:
            return found, None
        delta = encode(base[index].numpy(), body, most=int(WORTH * len(body)))
        return found, body if delta is None else delta

    with ThreadPoolExecutor(THREADS) as pool:
        done = dict(zip(new, pool.map(one, new), strict=True))
    checksums = {index: crc for index, (crc, _) in done.items()}
    travels = {index: content for index, (_, content) in done.items() if content is not None}
    return Part(checksums, base is not None, travels)


def _sizes(buckets: Mapping[int, Tensor]) -> dict[int, int]:
    return {index: body.numel() for index, body in buckets.items()}


def worth(sent: int, whole: int) -> bool:
    """True if a version that travels as so many bytes is not better whole."""
    return sent <= WORTH * whole
