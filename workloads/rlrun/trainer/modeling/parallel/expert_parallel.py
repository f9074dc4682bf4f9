"""Expert parallelism: every rank of a group has a part of the experts, and tokens are sent to their experts and back.

With tensor parallelism the group includes the tensor ranks, which have the same tokens. Therefore each tensor rank sends only tokens of
the experts in its own column of the group, and the results are summed over the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear

from rlrun.config.layout_rules import experts_problem
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.collectives import copy_to, exchange_rows, reduce_from


def experts_of(layer: nn.Module) -> Any:
    """Return the module of a layer's experts, with one tensor each for `gate_up_proj` and `down_proj` of all experts; None for a dense
    layer.
    """
    return getattr(getattr(layer, "mlp", None), "experts", None)


def divide_experts(layers: Iterable[nn.Module], mesh: DeviceMesh, tp: DeviceMesh | None) -> None:
    """Distribute every layer's experts over `mesh`, in place, in equal contiguous parts.

    Raises:
        RoleError: the model has no experts, or their number is not a multiple of the ranks.
    """
    found = [experts for layer in layers if (experts := experts_of(layer)) is not None]
    columns = 1 if tp is None else tp.size()
    sizes = {"ep": mesh.size() // columns, "tp": columns}
    for number in {experts.num_experts for experts in found} or {0}:
        if (problem := experts_problem(sizes["ep"], columns, number)) is not None:
            field, text = problem
            raise RoleError(f"trainer.parallelism.{field} ({sizes[field]}) {text}", exit_codes.CONFIGURATION)
    for experts in found:
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            divided = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
            experts.register_parameter(name, divided)
        experts.forward = partial(_forward_experts, experts, mesh.get_group(), None if tp is None else tp.get_group())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward_experts(
    experts: Any,
    group: dist.ProcessGroup,
    tp: dist.ProcessGroup | None,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the output of a layer's experts for this rank's tokens.

    Args:
        experts: module with this rank's experts.
        group: ranks that share the experts.
        tp: ranks with the same tokens, or None.
        hidden: hidden states, `[N, D]`.
        chosen: numbers of the chosen experts, `[N, K]` int64.
        weights: weights of the chosen experts, `[N, K]`.

    Returns:
        Weighted sum over the chosen experts, `[N, D]`.
    """
    if tp is not None:
        hidden, weights = copy_to(hidden, tp), copy_to(weights, tp)
    gate_up, down = (
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (experts.gate_up_proj, experts.down_proj)
    )
    own, ranks = gate_up.shape[0], dist.get_world_size(group)
    # Select the tokens of the experts in this rank's column, ordered by expert.
    columns, column = (1, 0) if tp is None else (dist.get_world_size(tp), dist.get_rank(tp))
    expert, order = chosen.flatten().sort(stable=True)
    here = (expert // own) % columns == column
    expert, order = expert[here], order[here]
    token = order // chosen.shape[1]

    # Exchange the number of tokens per expert, then the tokens.
    counts = torch.bincount(expert, minlength=own * ranks)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    per_rank = torch.stack([counts.view(ranks, own).sum(1), incoming.view(ranks, own).sum(1)]).tolist()
    arrived = exchange_rows(hidden[token], per_rank[0], per_rank[1], group)

    # Received rows are ordered by rank, then by expert: group them by expert, and restore the order afterwards.
    number = torch.arange(own, device=hidden.device).repeat(ranks).repeat_interleave(incoming)
    grouped = number.argsort(stable=True)
    sizes = incoming.view(ranks, own).sum(0)
    computed = _compute_experts(arrived[grouped], sizes, gate_up, down, experts.act_fn)
    returned = exchange_rows(
        torch.empty_like(computed).index_copy(0, grouped, computed), per_rank[1], per_rank[0], group
    )

    # Sum the weighted results per token; with tensor parallelism also over the columns.
    weighted = returned * weights.flatten()[order, None]
    output = torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype))
    return output if tp is None else reduce_from(output, tp)


def _compute_experts(tokens: Tensor, sizes: Tensor, gate_up: Tensor, down: Tensor, activation: Any) -> Tensor:
    """Compute the gated feed-forward of `tokens [M, D]`, with `sizes[e]` contiguous rows for expert e.

    Without rows the gradients are 0 instead of missing, because FSDP waits for them.
    """
    if tokens.is_cuda and tokens.dtype == torch.bfloat16:
        ends = sizes.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(tokens, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(activation(gate) * up, down.transpose(1, 2), offs=ends)
    parts = []
    for rows, first, second in zip(tokens.split(sizes.tolist()), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = linear(rows, first).chunk(2, dim=-1)
        parts.append(linear(activation(gate) * up, second))
    return torch.cat(parts)
