"""Differences between the buckets of a version and the previous version, for the network or for files on the volume."""

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
"""Largest size of a difference, as a fraction of a bucket and of a version; larger ones are sent completely."""
THREADS = 4


@dataclass(frozen=True)
class Part:
    """Checksums and differences of a rank's buckets of a version, by index."""

    checksums: Mapping[int, int]
    """CRC-32 of each bucket."""
    compared: bool
    """Whether the buckets were compared with a previous version of the same layout."""
    travels: Mapping[int, Bytes]
    """Bytes for engines with the previous version: a difference, nothing (unchanged), or the complete bucket. Empty without a
    comparison.
    """

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each entry of `travels`."""
        return {index: len(content) for index, content in self.travels.items()}


@dataclass(frozen=True)
class About:
    """Checksums and sizes of a root's part of a version, reported to rank 0. Keys are indices of buckets."""

    checksums: dict[int, int]
    """CRC-32 of each bucket."""
    base: dict[int, int] | None
    """Checksums of the previous version, or None without a comparison."""
    sizes: dict[int, int]
    """Bytes of each bucket to send to engines with the previous version, see `Difference.sizes`. Empty without a comparison."""

    @classmethod
    def from_part(cls, part: Part, before: Part | None) -> About:
        """Describe a part that was compared with the previous one."""
        compared = before is not None and part.compared
        return cls(
            dict(part.checksums), dict(before.checksums) if compared and before is not None else None, part.sizes
        )

    @classmethod
    def parse(cls, content: str | bytes) -> About:
        """Parse the result of `dump`."""
        found = json.loads(content)
        by_index = {
            name: None if part is None else {int(index): value for index, value in part.items()}
            for name, part in found.items()
        }
        return cls(by_index["checksums"] or {}, by_index["base"], by_index["sizes"] or {})

    def dump(self) -> str:
        """Return the JSON text for the store."""
        return json.dumps(asdict(self))


def compare_buckets(new: Mapping[int, Tensor], base: Mapping[int, Tensor] | None) -> Part:
    """Compute checksums of a version's buckets and, with a base, the differences from it.

    Args:
        new: buckets by index, uint8 in host memory.
        base: buckets of the previous version; None or another layout disables the comparison.
    """
    if base is not None and _tensor_sizes(base) != _tensor_sizes(new):
        base = None

    def compare(index: int) -> tuple[int, Bytes | None]:
        body: Bytes = new[index].numpy()
        found = zlib.crc32(body.data)
        if base is None:
            return found, None
        delta = encode_difference(base[index].numpy(), body, most=int(WORTH * len(body)))
        return found, body if delta is None else delta

    with ThreadPoolExecutor(THREADS) as pool:
        done = dict(zip(new, pool.map(compare, new), strict=True))
    checksums = {index: crc for index, (crc, _) in done.items()}
    travels = {index: content for index, (_, content) in done.items() if content is not None}
    return Part(checksums, base is not None, travels)


def _tensor_sizes(buckets: Mapping[int, Tensor]) -> dict[int, int]:
    return {index: body.numel() for index, body in buckets.items()}


def in_order(parts: Sequence[Mapping[int, int]]) -> list[int]:
    """Merge the values of all roots' buckets into a list in the order of the buckets."""
    found = {index: value for part in parts for index, value in part.items()}
    return [found[index] for index in range(len(found))]


def version_difference(parts: Sequence[About], whole: int) -> Difference | None:
    """Return the difference from the previous version, or None if a root lacks it or it is too large for a version of `whole` bytes."""
    bases = [part.base for part in parts if part.base is not None]
    sent = sum(sum(part.sizes.values()) for part in parts)
    if len(bases) != len(parts) or sent > WORTH * whole:
        return None
    return Difference(base=version_checksum(in_order(bases)), sizes=in_order([part.sizes for part in parts]))
