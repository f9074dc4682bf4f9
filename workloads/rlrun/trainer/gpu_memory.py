"""GPU memory of a run that shares its GPUs with engines in turn. Every rank runs the same code.

    start    wait until the colocated engines sleep; load, publish, move to the host, report
    step     check that the engines sleep; move to the GPU; train, publish, save; move to the host, report

Parameters, optimizer states and auxiliary models move to host memory. The process keeps its CUDA context and its communicators, some
hundred MB. A run whose state is on the host anyway (`cpuOffload`) only empties the CUDA cache.
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
    """State of one run that moves between this rank's GPU and host memory.

    Args:
        engines: engines on the same GPUs.
        modules: all sharded modules of the run.
        optimizers: optimizers of the trained modules.
        device: GPU of this rank.
        stays: whether parameters and optimizer states are always on the host.
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
        """Optimizer states that were on the GPU; some states are always on the host."""
        self.on_gpu = True
        """Whether the run's state is on the GPU."""

    def move_to_gpu(self) -> None:
        """Move the run's state to the GPU.

        Raises:
            RoleError: an engine is awake.
        """
        if self.on_gpu:
            return
        self._engines.check()
        if not self._stays:
            for module in self._modules:
                module.to(self._device)
            for state, name in self._moved:
                state[name] = state[name].to(self._device)
            self._moved = []
        self.on_gpu = True
        reach("turn.memory_taken")

    def move_to_host(self) -> None:
        """Move the run's state to host memory. Gradients do not exist at the end of a step."""
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
        self.on_gpu = False
        reach("turn.memory_given")
