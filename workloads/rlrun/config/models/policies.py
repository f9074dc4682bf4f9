"""Policies that an evaluation run without training evaluates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlrun.config.base import Config
from rlrun.config.formats import RunFolder


class PoliciesConfig(Config):
    """Policies of another run. Without `steps` and `base`: the base model and every available step."""

    from_run: RunFolder
    """A run by name, on the same volume, or a folder: of a run, or of policies (`step_10`, `checkpoint-10`)."""
    steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=256)] | None = None
    """Steps to evaluate. Default: every available step."""
    base: bool = False
    """Evaluate the base model, in addition to `steps` or without steps."""
