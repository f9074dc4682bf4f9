"""Gradients between micro-batches: `python -m tests.trainer.gradient_memory FILE RANKS PORT` trains and measures.

The program writes `{case: [one per rank]}` with the fields of `Held` and the metrics of the step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlrun.algorithms import Mixture
from rlrun.config.models.learning import OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.learning.critic import Critic, critic_step, to_critic
from rlrun.trainer.learning.forward import Signals
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling.shard import Memory, fsdp_modules, shard_model
from rlrun.trainer.ranks.group import Group, Meshes, ParallelDims, process_group
from tests.trainer import layouts
from tests.trainer.counted import Collectives
from tests.trainer.held import watched

ROW_TOKENS = 32
"""Tokens that give three or more micro-batches on each rank."""
CASES: dict[int, dict[str, Memory]] = {
    2: {
        "policy": Memory(),
        "policy-local": Memory(accumulation="local"),
        "policy-bfloat16": Memory(torch.bfloat16),
        "critic": Memory(),
        "critic-local": Memory(accumulation="local"),
        "replicas": Memory(),
    },
    4: {"policy": Memory(), "hybrid": Memory()},
}
"""Memory settings by number of ranks and case."""
LAYOUTS = {"replicas": {"dp_replicate": 2}, "hybrid": {"dp_replicate": 2}}


def measure(case: str, world: Group) -> dict[str, Any]:
    ranks = world.world_size
    meshes = Meshes(ParallelDims.from_config(ParallelismConfig(**LAYOUTS.get(case, {})), ranks), "cpu")
    group = Group(world.rank, world.world_size, world.device, meshes.layers, meshes)
    batch = Batch(1, 1, tuple(sample for step in range(ranks) for sample in layouts.make_batch(1 + step).samples))
    lengths = [len(sample) for sample in batch.samples]
    rows = plan_micro_batches(lengths, row_tokens=ROW_TOKENS, ranks=group.data_size).ranks[group.data_rank]
    model = layouts.make_model("qwen3", 0)
    critic = case.startswith("critic")
    if critic:
        to_critic(model)
        torch.nn.init.normal_(model.get_output_embeddings().weight)  # with a head of 0, the body has no gradient
    shard_model(model, group, memory=CASES[ranks][case])
    optimizer = make_optimizer(model, OptimizerConfig(name="sgd", lr=1.0, momentum=0.0), group.device)
    with watched(model) as held, Collectives() as sent:
        if critic:
            lengths = [sum(len(batch.samples[i]) for i in row) or 2 for row in rows]
            signals = [Signals(values=torch.zeros(n), returns=torch.ones(n)) for n in lengths]
            inputs = micro_batches([[batch.samples[i] for i in row] for row in rows], group.device)
            metrics = critic_step(Critic(model, optimizer), batch, inputs, signals, group=group, lr=1.0)
        else:
            metrics = train_step(
                model,
                optimizer,
                Update(batch, rows),
                group=group,
                loss=Mixture(layouts.LOSS),
                lr=1.0,
                max_grad_norm=None,
            )
    kept = ("loss", "grad_norm", "value_loss", "critic_grad_norm")
    counted = {"calls": dict(sent.calls), "sent": dict(sent.bytes), "units": len(fsdp_modules(model))}
    return asdict(held) | counted | {name: metrics[name] for name in kept if name in metrics}


def rank_main(file: Path) -> None:
    with process_group(0) as world:
        found: dict[str, Any] = {}
        for case in CASES[world.world_size]:
            ranks: list[Any] = [None] * world.world_size
            dist.all_gather_object(ranks, measure(case, world))
            found[case] = ranks
        if world.leads:
            file.write_text(json.dumps(found))
        world.barrier()


if __name__ == "__main__":
    sys.exit(layouts.fork_ranks(int(sys.argv[2]), int(sys.argv[3]), lambda: rank_main(Path(sys.argv[1]))))
