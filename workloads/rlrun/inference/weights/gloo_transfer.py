"""vLLM's weight transfer between CPUs: what its own `nccl` engine does between GPUs, over gloo.

Our plugin registers it in every process of an engine.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlrun.inference.command import GLOO_BACKEND
from rlrun.protocol.messages.transfer import SECONDS


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM ships no types
    """Parameters for a worker to join; see `rlrun.protocol.messages.transfer.Joining`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM ships no types
    """The tensors that come, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]  # vLLM ships no types
    """One worker's end of the trainer's group."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group; the one before, if any, is left."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = datetime.timedelta(seconds=SECONDS)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, init_info.world_size, timeout=limit)
        self._group = dist.ProcessGroupGloo(store, rank, init_info.world_size, limit)

    def start_weight_update(self) -> None:
        """Prepare the model for tensors as from files, layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Finish the update: all tensors are there."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receive weights without the base class's wait for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive each tensor and give it to the model."""
        assert self._group is not None, "init_transfer_engine comes first"
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor, 0).wait()
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def register() -> None:
    """Make it known to vLLM; called once or more in each process."""
    if GLOO_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(GLOO_BACKEND, GlooWeightTransferEngine)
