"""Request of an engine to the trainer's rank 0 for a policy version without the volume: `POST /rlrun/trainer/transfers`.

The answer says what comes; then the tensors come one after the other, as broadcasts of rank 0 in a group of its own with the workers of
that one engine (NCCL between GPUs, gloo between CPUs). A group for each engine, so that one that hangs or dies holds up no other. It is
kept for later versions; a side that finds it broken forgets it, and the next answer says how to join a new one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrun.config.base import Config

TRANSFERS = "/rlrun/trainer/transfers"
Backend = Literal["nccl", "gloo"]
SECONDS = 120.0
"""Longest wait of a gloo group for its members, and for one tensor."""


class NotHeldError(Exception):
    """The version is not in the trainer's memory (any more)."""


class TransferRequest(Config):
    """Request of an engine."""

    version: Annotated[int, Field(ge=0)]
    """The policy version."""
    workers: Annotated[int, Field(ge=1, le=4096)]
    """The engine's workers: tensor times data parallel."""
    session: str | None = None
    """The group that the engine is in; None: in none."""


class TensorInfo(Config):
    """One tensor of a version."""

    name: str
    """Name as in the files of a published version."""
    dtype: str
    """torch's name of the number format, such as `bfloat16`."""
    shape: list[int]
    """Whole, not of a shard."""


class Joining(Config):
    """Parameters for the engine's workers, ranks 1 to `workers`, to join a new group."""

    backend: Backend
    """Backend of the group."""
    world_size: int
    """Rank 0 and the workers."""
    unique_id: str | None = None
    """NCCL's, in base64."""
    store_port: int | None = None
    """gloo: where rank 0 keeps the store, at the trainer's address."""


class TransferOffer(Config):
    """Announcement of the next transfer."""

    version: int
    """Policy version as asked for."""
    session: str
    """The group."""
    joining: Joining | None = None
    """None: the group that the engine named is still there."""
    tensors: list[TensorInfo]
    """Tensors in the order of sending."""
