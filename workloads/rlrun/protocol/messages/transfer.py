"""Request of an engine to the trainer's rank 0 for a policy version without the volume: `POST /rlrun/trainer/transfers`.

The answer says what comes, and how to join. Then every root, a rank of the trainer that keeps a part of the version, broadcasts its buckets
in their published order, in one group of that root and all engines that asked for the version together (NCCL between GPUs, gloo between
CPUs). Groups are kept for later versions while the same engines ask. Where one breaks, all of its engines refuse the version and keep what
they serve; each of them asks again `alone`, until it has received a version, so that one that hangs or dies holds the others up once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrun.config.base import Config
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets, version_checksum

TRANSFERS = "/rlrun/trainer/transfers"
Backend = Literal["nccl", "gloo"]
SECONDS = 60.0
"""Longest wait of a group for its members, and for one bucket."""


class NotHeldError(Exception):
    """The version is not in the trainer's memory (any more)."""


class TransferRequest(Config):
    """Request of an engine."""

    version: Annotated[int, Field(ge=0)]
    """The policy version."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the engine's process, which no other has."""
    session: str | None = None
    """The groups that the engine is in; None: in none."""
    alone: bool = False
    """The engine's last transfer failed: it shares no group before one succeeds."""
    base: int | None = None
    """Checksum of the version that the engine has in its shared memory; None: it has none, and takes whole versions alone."""


class Joining(Config):
    """Parameters to join the groups of a session: one for each root, of which the root is rank 0."""

    backend: Backend
    """Backend of the groups."""
    store_port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the store where members find each other, at the trainer's address."""
    members: list[str]
    """The engines by name; the first is rank 1 in every group."""

    @property
    def world_size(self) -> int:
        """Size of each group: its root and the engines."""
        return 1 + len(self.members)


class Difference(Config):
    """Announcement that buckets come as differences from a version that all engines of the round have."""

    base: int
    """Checksum of that version."""
    sizes: list[int]
    """Bytes that come of each bucket, in order: those of a difference (`sparse`); 0: it is unchanged; all of the bucket's: it is whole."""


class TransferOffer(Config):
    """Announcement of the next transfer."""

    version: int
    """Policy version as asked for."""
    session: str
    """The groups."""
    joining: Joining | None = None
    """None: the groups that the engine named are still there."""
    tensors: list[TensorInfo]
    """Tensors in their published order; with the next two fields they give the buckets."""
    bucket_bytes: Annotated[int, Field(ge=1)]
    """Bound of one bucket, see `plan_buckets`."""
    roots: Annotated[int, Field(ge=1)]
    """Number of roots."""
    checksums: list[int]
    """CRC-32 of each bucket, in order."""
    difference: Difference | None = None
    """None: all buckets come whole."""

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sent(self) -> int:
        """Bytes that are sent of it."""
        return self.size if self.difference is None else sum(self.difference.sizes)

    def buckets(self) -> list[Bucket]:
        """The buckets that come."""
        return plan_buckets(self.tensors, bucket_bytes=self.bucket_bytes, roots=self.roots)

    def about(self) -> str:
        """Size and checksum, the same in the logs of both sides."""
        about = f"{self.size / 2**30:.2f} GiB in {len(self.checksums)} buckets, checksum {version_checksum(self.checksums):08x}"
        if self.difference is None:
            return about
        return f"{about}; sent as {self.sent} of {self.size} bytes, what differs from {self.difference.base:08x}"


def group_name(session: str, root: int) -> str:
    """Name of one root's group in the store, the same for all of its members."""
    return f"transfer/{session}/{root}"
