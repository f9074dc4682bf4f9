"""Work, traffic and memory of Muon on ranks: `python -m tests.trainer.muon_memory FILE RANKS PORT` steps and measures.

The program writes `{case: [one per rank]}` with the fields of `measure`, sizes in bytes.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlrun.config.models.learning import OptimizerConfig
from rlrun.trainer.learning.optim import muon
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.shard import decoder_layers, local_part, shard_model
from rlrun.trainer.ranks.group import Group, process_group
from tests.trainer import layouts
from tests.trainer.counted import Collectives, LiveBytes

CASES = {"few": (2, None), "many": (8, None), "bounded": (2, 2**15)}
"""Number of experts, and limit of bytes of matrices of a rank, by case."""
CONFIG = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
STEPS = 3


def make_model(experts: int) -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **sizes, num_experts=experts, num_experts_per_tok=2))


def set_gradients(model: nn.Module, step: int) -> None:
    """Set the same gradients with any sharding."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient


def compare_resumed(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step from a saved state gives the same bits, for weights and momentum."""
    weights = [local_part(p.detach()).clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    set_gradients(model, STEPS)
    optimizer.step()
    expected = [local_part(p.detach()).clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            local_part(parameter).copy_(weight)
    again = make_optimizer(model, CONFIG, torch.device("cpu"))
    again.load_state_dict(state)
    again.step()
    return all(torch.equal(local_part(p.detach()), one) for p, one in zip(model.parameters(), expected, strict=True))


def measure(case: str, world: Group) -> dict[str, Any]:
    """Take steps, the second one with counts: the first one creates the momentum."""
    experts, limit = CASES[case]
    whole = make_model(experts)
    model = shard_model(copy.deepcopy(whole), world)
    single = make_optimizer(whole, CONFIG, world.device)
    optimizer = make_optimizer(model, CONFIG, world.device)
    orthogonalized: list[int] = []
    orthogonalize = muon.orthogonalize

    def count(matrices: Tensor) -> Tensor:
        orthogonalized.append(matrices.numel())
        return orthogonalize(matrices)

    for step in range(STEPS - 1):
        orthogonalized.clear()
        for each, stepped in ((whole, single), (model, optimizer)):
            set_gradients(each, step)
            if each is whole:
                stepped.step()
        with (
            mock.patch.object(muon, "orthogonalize", count),
            mock.patch.object(muon, "BATCH_BYTES", limit or muon.BATCH_BYTES),
            LiveBytes() as memory,
            Collectives() as sent,
        ):
            # Count weights, gradients and states before the step.
            held = [*model.parameters(), *(p.grad for p in model.parameters()), *tree_leaves(optimizer.state)]
            kept = [tensor.detach() for tensor in held if isinstance(tensor, Tensor)]
            before = memory.live
            optimizer.step()
            del kept
    matrices = [p for p in decoder_layers(model).parameters() if p.ndim >= 2]
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return {
        "difference": max(float((p.detach().full_tensor() - q.detach()).abs().max()) for p, q in pairs),
        "resumed": compare_resumed(model, optimizer),
        "matrices": 4 * sum(p.numel() for p in matrices),
        "largest": 4 * max(p.numel() for p in matrices),
        "shard": 4 * sum(local_part(p).numel() for p in matrices),
        "exchanged": 4 * sum(local_part(p).numel() for p in matrices if p.ndim == 2 or experts < world.world_size),
        "orthogonalized": 4 * sum(orthogonalized),
        "batches": [4 * size for size in orthogonalized],
        "peak": memory.peak - before,
        "calls": dict(sent.calls),
        "sent": dict(sent.bytes),
    }


def rank_main(file: Path) -> None:
    with process_group(0) as world:
        found: dict[str, Any] = {}
        for case in CASES:
            ranks: list[Any] = [None] * world.world_size
            dist.all_gather_object(ranks, measure(case, world))
            found[case] = ranks
        if world.leads:
            file.write_text(json.dumps(found))
        world.barrier()


if __name__ == "__main__":
    sys.exit(layouts.fork_ranks(int(sys.argv[2]), int(sys.argv[3]), lambda: rank_main(Path(sys.argv[1]))))
