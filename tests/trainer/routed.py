"""Router replay over ranks: `python -m tests.trainer.routed FILE RANKS PORT SOURCE BATCH FIELD` computes a batch with and without routes.

FIELD is a field of `trainer.parallelism` with RANKS as its value, or `dp_shard`. The program writes the log-probabilities of each sample
`{mode: {"native" | "replayed": [[...], ...]}}` for activation modes, the metrics of a replayed pass, and the auxiliary loss of the batch
with its gradients on the routers, from rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.protocol.files.batch import Batch, read_batch
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.router_balance import Balance
from rlrun.trainer.modeling.router_replay import routing_of
from rlrun.trainer.modeling.shard import Memory
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group, process_group
from tests.support.routed_models import ROW_TOKENS
from tests.trainer import layouts

MODES = ("none", "full")
COEFFICIENT = 0.1


def sample_logprobs(model: nn.Module, batch: Batch, group: Group, *, with_routes: bool) -> list[list[float]]:
    """Compute forward and backward passes of this rank's rows, and return the log-probabilities of all ranks' samples."""
    lengths = [len(sample) for sample in batch.samples]
    planned = plan_micro_batches(lengths, row_tokens=ROW_TOKENS, ranks=group.data_size).ranks[group.data_rank]
    rows = micro_batches([[batch.samples[i] for i in row] for row in planned], group.device, with_routes=with_routes)
    own: dict[int, Tensor] = {}
    for indices, row in zip(planned, rows, strict=True):
        logprobs = token_statistics(model, row).logprobs
        logprobs.square().sum().backward()
        own |= dict(zip(indices, logprobs.detach().split([lengths[i] for i in indices]), strict=False))
    every: list[dict[int, Tensor]] = [{}] * group.world_size
    dist.all_gather_object(every, own)
    joined = {index: values for part in every for index, values in part.items()}
    return [joined[index].tolist() for index in range(len(lengths))]


def balance_gradients(model: nn.Module, batch: Batch, group: Group) -> dict[str, Any]:
    """Return the auxiliary loss over the rows of all ranks, and the gradients of the routers without any other loss."""
    routing = routing_of(model)
    assert routing is not None
    routing.balance = Balance(COEFFICIENT, len(batch.samples))
    lengths = [len(sample) for sample in batch.samples]
    planned = plan_micro_batches(lengths, row_tokens=ROW_TOKENS, ranks=group.data_size).ranks[group.data_rank]
    # A rank without samples computes a row of padding.
    rows = [[batch.samples[i] for i in row] for row in planned] + [[]]
    for row in micro_batches(rows, group.device):
        (token_statistics(model, row).logprobs.sum() * 0).backward()
    counts = routing.take_counts(group.device)
    counts.add_ranks(with_loss=True)
    gradients = {
        name: one.grad.full_tensor().tolist()  # type: ignore[union-attr]
        for name, one in model.named_parameters()
        if name.endswith(".gate.weight")
    }
    return {"loss": float(counts.aux_loss), "gradients": gradients}


def rank_main(file: Path, source: str, batch: Batch, parallelism: ParallelismConfig) -> None:
    with process_group(0, parallelism) as group:
        found: dict[str, Any] = {}
        for mode in MODES:
            options = LoadOptions(memory=Memory(activations=mode), with_routing=True)  # type: ignore[arg-type]
            model = load_checked(ModelConfig(path=source), source, group, seq_len=32, options=options)
            found[mode] = {"native": sample_logprobs(model, batch, group, with_routes=False)}
            routing = routing_of(model)
            assert routing is not None
            routing.take_counts(group.device)
            found[mode]["replayed"] = sample_logprobs(model, batch, group, with_routes=True)
            counts = routing.take_counts(group.device)
            counts.add_ranks(with_loss=False)
            found[mode]["metrics"] = counts.metrics()
        options = LoadOptions(memory=Memory(activations="full"), with_routing=True)
        model = load_checked(ModelConfig(path=source), source, group, seq_len=32, options=options)
        found["balance"] = balance_gradients(model, batch, group)
        if group.leads:
            file.write_text(json.dumps(found))
        dist.barrier()


def main(file: str, ranks: str, port: str, source: str, batch: str, field: str) -> int:
    sizes = {} if field == "dp_shard" else {field: int(ranks)}
    torch.set_num_threads(1)
    return layouts.fork_ranks(
        int(ranks),
        int(port),
        lambda: rank_main(Path(file), source, read_batch(Path(batch)), ParallelismConfig(**sizes)),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
