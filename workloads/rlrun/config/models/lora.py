"""Low-rank adapters (LoRA): what is trained instead of all weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlrun.config.base import Config
from rlrun.config.formats import ModulePattern


class LoRAConfig(Config):
    """Train low-rank adapters (Hu et al., 2021) and leave the model's own weights as they are."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank r of the update (alpha / r) B A of each weight matrix."""
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """Numerator of the update's scale, alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zeroed in training."""
    targets: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Linear layers with an adapter: the end of their names (`q_proj`, `mlp.up_proj`), with `*`. Default: all of attention and MLP."""
    modules_to_save: Annotated[list[ModulePattern], Field(max_length=64)] = Field(default_factory=list)
    """Modules trained in full, such as `lm_head`; merged weights are published, since vLLM takes no such adapter."""

    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Runs whose adapters the trainer holds, itself included; above 1, others may share it (`sharedWith`)."""

    @property
    def served_as_adapter(self) -> bool:
        """True if the engine is given the adapter alone; else it gets whole weights with the update in them."""
        return not self.modules_to_save
