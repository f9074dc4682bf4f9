"""Low-rank adapters (LoRA), which are trained instead of all weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlrun.config.base import Config
from rlrun.config.formats import ModulePattern


class LoRAConfig(Config):
    """Train low-rank adapters (Hu et al., 2021); the model's own weights do not change."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank r of the update (alpha / r) B A of each weight matrix."""
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """Numerator of the update's scale, alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zeroed in training."""
    targets: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Linear layers with an adapter, by the end of their names (`q_proj`, `mlp.up_proj`); `*` is allowed. Default: attention and MLP."""
    modules_to_save: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Modules trained in full, such as `lm_head`. Merged weights are published then, because vLLM cannot load such adapters."""

    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of runs whose adapters the trainer holds, including this run. Above 1, other runs may share it (`sharedWith`)."""

    @property
    def served_as_adapter(self) -> bool:
        """Whether the engine receives only the adapter. Otherwise it receives all weights, with the update merged."""
        return not self.modules_to_save
