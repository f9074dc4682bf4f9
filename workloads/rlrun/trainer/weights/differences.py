"""Differences of a version's buckets from those of the version before, as they travel: over the network, or in files on the volume."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from torch import Tensor

from rlrun.protocol.messages.buckets import version_checksum
from rlrun.protocol.messages.sparse import Bytes, encode_difference
from rlrun.protocol.messages.transfer import Difference

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


@dataclass(frozen=True)
class About:
    """Facts of a root's part of a version, as it says them to rank 0. Keys are indices of buckets."""

    checksums: dict[int, int]
    """CRC-32 of each bucket."""
    base: dict[int, int] | None
    """Those of the version before; None: nothing is compared with it."""
    sizes: dict[int, int]
    """Bytes that are sent of each bucket to engines that have the version before; see `Difference.sizes`. Empty: there is none."""

    @classmethod
    def of(cls, part: Part, before: Part | None) -> About:
        """The facts of a part, which was compared with the one before."""
        compared = before is not None and part.compared
        return cls(
            dict(part.checksums), dict(before.checksums) if compared and before is not None else None, part.sizes
        )

    @classmethod
    def parse(cls, content: str | bytes) -> About:
        """What `dump` made."""
        found = json.loads(content)
        by_index = {
            name: None if part is None else {int(index): value for index, value in part.items()}
            for name, part in found.items()
        }
        return cls(by_index["checksums"] or {}, by_index["base"], by_index["sizes"] or {})

    def dump(self) -> str:
        """Text for the store."""
        return json.dumps(asdict(self))


def compare_buckets(new: Mapping[int, Tensor], base: Mapping[int, Tensor] | None) -> Part:
    """Checksums of a version's buckets and, with a version before, what differs from it.

    Args:
        new: uint8 in host memory, by index.
        base: the version before; None, or another layout: there are no differences.
    """
    if base is not None and _tensor_sizes(base) != _tensor_sizes(new):
        base = None

    def one(index: int) -> tuple[int, Bytes | None]:
        body: Bytes = new[index].numpy()
        found = zlib.crc32(body.data)
        if base is None:
            return found, None
        delta = encode_difference(base[index].numpy(), body, most=int(WORTH * len(body)))
        return found, body if delta is None else delta

    with ThreadPoolExecutor(THREADS) as pool:
        done = dict(zip(new, pool.map(one, new), strict=True))
    checksums = {index: crc for index, (crc, _) in done.items()}
    travels = {index: content for index, (_, content) in done.items() if content is not None}
    return Part(checksums, base is not None, travels)


def _tensor_sizes(buckets: Mapping[int, Tensor]) -> dict[int, int]:
    return {index: body.numel() for index, body in buckets.items()}


def in_order(parts: Sequence[Mapping[int, int]]) -> list[int]:
    """Values of all buckets of all roots, in the buckets' order."""
    found = {index: value for part in parts for index, value in part.items()}
    return [found[index] for index in range(len(found))]


def version_difference(parts: Sequence[About], whole: int) -> Difference | None:
    """The difference from the version before, if all roots have it and it is worth it for a version of `whole` bytes."""
    bases = [part.base for part in parts if part.base is not None]
    sent = sum(sum(part.sizes.values()) for part in parts)
    if len(bases) != len(parts) or sent > WORTH * whole:
        return None
    return Difference(base=version_checksum(in_order(bases)), sizes=in_order([part.sizes for part in parts]))
