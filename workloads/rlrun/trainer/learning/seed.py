"""Seed of the random generators for one step."""

from __future__ import annotations

import zlib

import torch


def seed_step(seed: int, step: int) -> None:
    """Seed the generators for a step: a resumed run draws what the uninterrupted one drew."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}".encode()))  # the CPU's generator looks at 32 bits only
