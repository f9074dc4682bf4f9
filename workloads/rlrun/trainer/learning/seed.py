"""Seeding of the random generators per step."""

from __future__ import annotations

import zlib

import torch


def seed_step(seed: int, step: int) -> None:
    """Seed torch's generators for a step, so that a resumed run draws the same numbers as an uninterrupted one."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}".encode()))  # the CPU generator uses only 32 bits of the seed
