"""Trained parameters of several runs that share one sharded model.

FSDP shards the parameters once, so a joining run cannot add parameters. Therefore the model has one set of adapters, and each run has its
own copy of this rank's shards: before a run computes, the values of the previous run are copied out and its own are copied in. Copies are
bitwise exact, and no parameter, gradient or optimizer state of one run affects another run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlrun.config.models.lora import LoRAConfig
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shard import local_part


class Adapters:
    """Exchange of adapter values in a model, which has the values of one run at a time. With only one run nothing is copied.

    Args:
        model: sharded model, with adapters if the run has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept: dict[str, list[Tensor]] = {}
        self._held: str | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def hold(self, run: str, config: LoRAConfig | None) -> None:
        """Load the values of a run into the model. For a new run the values are undefined; the caller must initialize them."""
        if self._held == run:
            return
        shards = [local_part(parameter.detach()) for parameter in self._parameters]
        if self._held is not None:
            kept = self._kept.setdefault(self._held, [torch.empty_like(shard) for shard in shards])
            torch._foreach_copy_(kept, shards)
        if run in self._kept:
            torch._foreach_copy_(shards, self._kept[run])
        if config is not None:
            lora.configure_adapters(self._model, config)
        self._held = run

    def forget(self, run: str) -> None:
        """Delete the values of a run."""
        self._kept.pop(run, None)
        if self._held == run:
            self._held = None
