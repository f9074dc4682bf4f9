"""Pipeline schedules for ranks with several stages: torch's schedules, extended to any number of rows.

torch's interleaved schedules require a multiple of the number of ranks as number of rows. The schedule of the next multiple is used
without the actions of missing rows, on which no other action depends. torch adds the sends and receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from rlrun.config.division import stages_of_rank
from rlrun.config.models.parallel import PipelineSchedule

Action = Any
"""Action of torch: a stage, a computation and a row."""
_KINDS = {
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Order:
    """Actions of all ranks in one step."""

    computed: Mapping[int, Sequence[Action]]
    """Computations of each rank."""
    sent: Mapping[int, Sequence[Action]]
    """Computations, sends and receives of each rank."""
    places: Mapping[int, int]
    """Rank of each stage."""


@lru_cache(maxsize=64)
def schedule_actions(
    schedule: PipelineSchedule, ranks: int, per_rank: int, rows: int, *, backward: bool = True
) -> Order:
    """Return the actions of one step.

    Args:
        schedule: schedule with several stages per rank.
        ranks: number of ranks in the pipeline.
        per_rank: number of stages per rank.
        rows: number of micro-batches, at least 1.
        backward: compute gradients; otherwise each rank runs all rows through its stages in order.
    """
    folded = schedule == "ZBVZeroBubble"
    stages = {rank: stages_of_rank(rank, ranks, per_rank, folded=folded) for rank in range(ranks)}
    places = {stage: rank for rank, own in stages.items() for stage in own}
    if not backward:
        forward = torch_schedules.FORWARD
        passes = {
            rank: [torch_schedules._Action(stage, forward, row) for stage in own for row in range(rows)]
            for rank, own in stages.items()
        }
        sent = torch_schedules._add_send_recv(
            {rank: list(own) for rank, own in passes.items()}, lambda stage: places[stage], ranks * per_rank
        )
        return Order(passes, sent, places)
    stand_ins = [
        SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
        for _ in range(per_rank)
    ]
    whole = _KINDS[schedule](stand_ins, -(-rows // ranks) * ranks)
    computed = {
        rank: [action for action in actions if action is not None and action.microbatch_index < rows]
        for rank, actions in whole.pipeline_order.items()
    }
    whole._n_microbatches = rows
    whole._prepare_schedule_with_comms({rank: list(actions) for rank, actions in computed.items()})
    return Order(computed, whole.pipeline_order_with_comms, places)
