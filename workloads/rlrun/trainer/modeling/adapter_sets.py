"""The trained parameters of several runs around one model that is sharded once.

FSDP shards a model's parameters when it starts, so a run that joins cannot add any. Instead the model has one set of adapters, and each run
keeps its own values of this rank's shards beside it: before a run computes, the values of the run before are taken out and its own put in.
A copy changes no bit, and no parameter, gradient or optimizer state of one run is ever an input of another's step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlrun.config.models.lora import LoRAConfig
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shard import local_part


class Adapters:
    """Exchange of the runs' values in the model, which holds one run's at a time. A model that one run alone trains is never copied.

    Args:
        model: sharded, with its adapters if there are any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept: dict[str, list[Tensor]] = {}
        self._held: str | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def hold(self, run: str, config: LoRAConfig | None) -> None:
        """Let the model be this run's, with its numbers. The values of a run that was never held are left to be filled."""
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
        """The run has left: its values are gone."""
        self._kept.pop(run, None)
        if self._held == run:
            self._held = None
