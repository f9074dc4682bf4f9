"""Request of an engine to the trainer's rank 0 for a policy version without the volume: `POST /rlrun/trainer/transfers`.

The answer announces the transfer and how to join it. Then every root, a trainer rank with a part of the version, broadcasts its buckets in
their published order, in one group of that root and all engines that requested the version together (NCCL between GPUs, gloo between
CPUs). Groups are reused for later versions while the same engines request them. If a group breaks, all of its engines discard the version
and keep serving their old one. Each of them then sends its next requests with `alone`, until a transfer succeeds, so that a hanging or dead
engine delays the others only once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrun.config.base import Config
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets, version_checksum

TRANSFERS = "/rlrun/trainer/transfers"
Backend = Literal["nccl", "gloo"]
SECONDS = 60.0
"""Maximum seconds that a group waits for its members, and for one bucket."""


class NotHeldError(Exception):
    """The version is not in the trainer's memory, or no longer."""


class TransferRequest(Config):
    """Request of an engine."""

    version: Annotated[int, Field(ge=0)]
    """Requested policy version."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Unique name of the engine's process."""
    session: str | None = None
    """Session of the groups that the engine has joined, or None."""
    alone: bool = False
    """Whether the engine's last transfer failed: it gets its own groups until a transfer succeeds."""
    base: int | None = None
    """Checksum of the version in the engine's shared memory; None: it has none, and needs complete versions."""


class Joining(Config):
    """Parameters to join the groups of a session: one per root, which is rank 0 of it."""

    backend: Backend
    """Backend of the groups."""
    store_port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the store at the trainer's address where members meet."""
    members: list[str]
    """Engines by name; the first is rank 1 in every group."""

    @property
    def world_size(self) -> int:
        """Size of each group: its root and the engines."""
        return 1 + len(self.members)


class Difference(Config):
    """Announcement that buckets are sent as differences from a version that all engines of the round have."""

    base: int
    """Checksum of that version."""
    sizes: list[int]
    """Sent bytes per bucket, in order: the size of its difference (`sparse`); 0: unchanged; the bucket's size: complete."""


class TransferOffer(Config):
    """Announcement of the next transfer."""

    version: int
    """Requested policy version."""
    session: str
    """Session of the groups."""
    joining: Joining | None = None
    """Parameters of new groups; None: the engine's groups are still valid."""
    tensors: list[TensorInfo]
    """Tensors in their published order; with the next two fields they determine the buckets."""
    bucket_bytes: Annotated[int, Field(ge=1)]
    """Maximum size of one bucket, see `plan_buckets`."""
    roots: Annotated[int, Field(ge=1)]
    """Number of roots."""
    checksums: list[int]
    """CRC-32 of each bucket, in order."""
    difference: Difference | None = None
    """Sizes of differences; None: all buckets are sent completely."""

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sent(self) -> int:
        """Number of sent bytes."""
        return self.size if self.difference is None else sum(self.difference.sizes)

    def buckets(self) -> list[Bucket]:
        """Return the buckets of the transfer."""
        return plan_buckets(self.tensors, bucket_bytes=self.bucket_bytes, roots=self.roots)

    def about(self) -> str:
        """Return size and checksum as text, identical in the logs of both sides."""
        about = f"{self.size / 2**30:.2f} GiB in {len(self.checksums)} buckets, checksum {version_checksum(self.checksums):08x}"
        if self.difference is None:
            return about
        return f"{about}; sent as {self.sent} of {self.size} bytes, the difference from {self.difference.base:08x}"


def group_name(session: str, root: int) -> str:
    """Return the name of one root's group in the store, identical for all of its members."""
    return f"transfer/{session}/{root}"
