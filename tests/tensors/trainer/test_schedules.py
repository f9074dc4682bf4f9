"""Pipeline schedules: torch's order for any number of rows, and the arithmetic of `rlrun fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.fit.layout import idle_share, kept_passes
from rlrun.trainer.modeling.parallel.pipeline import Action, later_weights_of, postpone_products, schedule_actions

UNITS = {Kind.FORWARD: 1, Kind.FULL_BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
SCHEDULES: tuple[tuple[PipelineSchedule, int], ...] = (
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 3),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
)


def slots(computed: Mapping[int, Sequence[Action]], stages: int) -> tuple[int, int]:
    """Return the time units of a step and those in which the first rank waits; each pass starts when its inputs are
    ready.
    """
    ends: dict[tuple[Kind, int, int], int] = {}
    clock, left, work = dict.fromkeys(computed, 0), {rank: [*actions] for rank, actions in computed.items()}, 0
    while any(left.values()):
        moved = False
        for rank, actions in left.items():
            while actions and all(key in ends for key in needed(actions[0], stages)):
                action = actions.pop(0)
                start = max([clock[rank], *(ends[key] for key in needed(action, stages))])
                clock[rank] = start + UNITS[action.computation_type]
                work += UNITS[action.computation_type] * (rank == 0)
                kind = Kind.BACKWARD_INPUT if action.computation_type == Kind.FULL_BACKWARD else action.computation_type
                ends[kind, action.stage_index, action.microbatch_index] = clock[rank]
                moved = True
        assert moved, "every rank waits for another"
    return max(clock.values()), max(clock.values()) - work


def needed(action: Action, stages: int) -> list[tuple[Kind, int, int]]:
    stage, kind, row = action.stage_index, action.computation_type, action.microbatch_index
    if kind == Kind.FORWARD:
        return [(kind, stage - 1, row)] if stage else []
    if kind == Kind.BACKWARD_WEIGHT:
        return [(Kind.BACKWARD_INPUT, stage, row)]
    return [(Kind.FORWARD, stage, row)] + ([(Kind.BACKWARD_INPUT, stage + 1, row)] if stage < stages - 1 else [])


def count_kept_passes(actions: Sequence[Action]) -> int:
    """Return the largest number of passes between forward and the gradients of weights."""
    now = most = 0
    for action in actions:
        now += action.computation_type == Kind.FORWARD
        now -= action.computation_type in (Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT)
        most = max(most, now)
    return most


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fit_idle_share_matches_torch_schedule(schedule: PipelineSchedule, per_rank: int, ranks: int) -> None:
    rows = 4 * ranks
    layout = ParallelismConfig(pp=ranks, schedule=schedule, stages_per_rank=per_rank)
    found = schedule_actions(schedule, ranks, per_rank, rows)
    total, idle = slots(found.computed, ranks * per_rank)
    assert idle / total == pytest.approx(idle_share(layout, rows))
    assert [count_kept_passes(found.computed[rank]) for rank in range(ranks)] == [
        kept_passes(layout, at) for at in range(ranks)
    ]


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("rows", [1, 3, 5, 11])
def test_schedule_handles_any_number_of_rows(schedule: PipelineSchedule, per_rank: int, rows: int) -> None:
    stages = 4 * per_rank
    found = schedule_actions(schedule, 4, per_rank, rows)
    slots(found.computed, stages)
    passes = [
        (one.computation_type, one.stage_index, one.microbatch_index) for own in found.computed.values() for one in own
    ]
    assert len(passes) == len(set(passes))
    assert sum(UNITS[kind] for kind, _, _ in passes) == 3 * stages * rows
    sends = sum(one.computation_type in (Kind.SEND_F, Kind.SEND_B) for own in found.sent.values() for one in own)
    within = 1 if schedule == "ZBVZeroBubble" else 0  # the last rank sends itself nothing
    assert sends == 2 * rows * (stages - 1 - within)


def test_forward_only_schedule_covers_every_stage() -> None:
    found = schedule_actions("ZBVZeroBubble", 2, 2, 3, backward=False)
    assert dict(found.places) == {0: 0, 3: 0, 1: 1, 2: 1}
    assert {one.computation_type for own in found.computed.values() for one in own} == {Kind.FORWARD}
    assert [one.stage_index for one in found.computed[0]] == [0, 0, 0, 3, 3, 3]


def test_postponed_weight_gradients_are_exact() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))
    hidden = torch.randn(2, 5, 4, requires_grad=True)
    expected = torch.autograd.grad(layers(hidden).square().sum(), [hidden, *layers.parameters()])
    postpone_products(layers, [layers])
    later = later_weights_of(layers)
    assert later is not None
    waiting = []
    for row in (hidden[:1], hidden[1:]):
        layers(row).square().sum().backward()
        waiting.append(later.take_products())
    assert [name for name, one in layers.named_parameters() if one.grad is not None] == ["1.weight", "1.bias"]
    torch.testing.assert_close(hidden.grad, expected[0])
    for add in waiting:
        add()
    for parameter, gradient in zip(layers.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
