"""Whose answers are asked for by a run that trains nothing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlrun.config.base import Config


class PoliciesConfig(Config):
    """Policies of another run. Without `steps` and `base`: the model, and every step that is there."""

    from_run: Annotated[str, Field(min_length=1, max_length=1024)]
    """A run by name, on the same volume, or a folder: of a run, or with policies (`step_10`, `checkpoint-10`)."""
    steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=256)] | None = None
    """These steps."""
    base: bool = False
    """The model itself, beside `steps` or alone."""
