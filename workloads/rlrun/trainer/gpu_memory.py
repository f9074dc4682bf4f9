"""Residence of a run in the memory of a GPU that the trainer shares with engines, in turn. The same on every rank.

    start    wait until the engines beside it sleep; load, publish, give the memory up, report
    step     see that the engines sleep; take the memory; train, publish, save; give it up, report

What is given up goes to the host's memory: parameters, optimizer states, and what stands beside the policy. The process keeps its CUDA
context and its communicators, some hundred MB. A run with its state on the host anyway (`cpuOffload`) only empties its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlrun.diagnostics.fault_points import reach
from rlrun.trainer.engines_beside import EnginesBeside

_HOST = torch.device("cpu")


class GPUMemory:
    """Residence of a run in the memory of this rank's GPU.

    Args:
        engines: that have the same GPUs.
        modules: sharded; all that the run computes with.
        optimizers: of some of them.
        device: this rank's.
        stays: whether parameters and optimizer states are on the host anyway.
    """

    def __init__(
        self,
        engines: EnginesBeside,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        stays: bool,
    ) -> None:
        self._engines, self._modules, self._optimizers = engines, modules, optimizers
        self._device, self._stays = device, stays
        self._moved: list[tuple[dict[str, Any], str]] = []
        """Optimizer states that were on the GPU: some never are."""
        self.held = True
        """True while it is the trainer's turn."""

    def take(self) -> None:
        """Everything back to the GPU.

        Raises:
            RoleError: an engine is awake.
        """
        if self.held:
            return
        self._engines.check()
        if not self._stays:
            for module in self._modules:
                module.to(self._device)
            for state, name in self._moved:
                state[name] = state[name].to(self._device)
            self._moved = []
        self.held = True
        reach("turn.memory_taken")

    def give(self) -> None:
        """Everything to the host's memory; no gradient is there at the end of a step."""
        if not self._stays:
            for module in self._modules:
                module.to(_HOST)
            for optimizer in self._optimizers:
                for state in optimizer.state.values():
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                            state[name] = value.to(_HOST)
                            self._moved.append((state, name))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self.held = False
        reach("turn.memory_given")
