"""Pipeline stages: the division of layers, and the memory of the largest stage."""

from __future__ import annotations

from itertools import combinations

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.fit.architecture import KNOWN
from rlrun.fit.layout import cut_layers, stages_of
from rlrun.fit.memory_parts import GIB, Needs
from rlrun.fit.report import Surroundings, needs_of

LARGE, MIXTURE = KNOWN["Qwen/Qwen3-8B"], KNOWN["Qwen/Qwen3-30B-A3B"]


def needs(**fields: object) -> Needs:
    fields = {"activationCheckpointing": "none"} | fields
    run = {"model": {"name": "Qwen/Qwen3-8B"}, "environments": [{"id": "gsm8k"}], "seqLen": 4096, "trainer": fields}
    memory = {"trainer": 80 * GIB, "inference": 80 * GIB}
    (found,) = needs_of(RLRunSpec.model_validate(run), Surroundings(LARGE, memory=memory))
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("costs", [[1.0] * 6, [3, 1, 1, 1, 1, 3], [1, 5, 1, 1, 1, 1], [2, 2, 2, 1, 9, 1]])
def test_layer_division_minimizes_largest_stage(costs: list[float], stages: int) -> None:
    head = 2.5

    def dearest(ends: tuple[int, ...]) -> float:
        bounds = [*zip((0, *ends), (*ends, len(costs)), strict=True)]
        return max(sum(costs[start:end]) + head * (end == len(costs)) for start, end in bounds)

    runs = cut_layers(costs, head, stages)
    assert [number for run in runs for number in run] == [*range(6)]
    assert all(runs)
    best = min(map(dearest, combinations(range(1, 6), stages - 1)))
    assert dearest(tuple(run.start for run in runs[1:])) == best


def test_first_stage_is_smallest_on_equal_cost() -> None:
    assert [len(run) for run in cut_layers([1] * 5, 0, 2)] == [2, 3]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be divided into 3 stages"):
        cut_layers([1, 1], 0, 3)


def test_stages_cover_the_whole_model() -> None:
    for model in (LARGE, MIXTURE):
        stages = stages_of(model, ParallelismConfig(pp=4))
        assert sum(stage.parameters for stage in stages) == pytest.approx(model.parameters, rel=1e-6)
        assert [stage.rows for stage in stages] == [4, 3, 2, 1]
        assert [stage.links for stage in stages] == [1, 2, 2, 1]
        (whole,) = stages_of(model, ParallelismConfig())
        assert whole.parameters == model.parameters


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_ranks_with_several_stages_cover_the_whole_model(schedule: PipelineSchedule) -> None:
    ranks = stages_of(LARGE, ParallelismConfig(pp=4, schedule=schedule))
    assert sum(rank.parameters for rank in ranks) == pytest.approx(LARGE.parameters, rel=1e-6)
    assert sorted(number for rank in ranks for number in rank.numbers) == [*range(8)]
    assert sum(rank.links for rank in ranks) == 14
    assert [rank.first for rank in ranks] == [True, False, False, False]
    assert [rank.last for rank in ranks].index(True) == (0 if schedule == "ZBVZeroBubble" else 3)


def test_pipeline_schedule_changes_memory_and_idle_time() -> None:
    notes = {}
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        fields = {"parallelism": {"pp": 4, "schedule": schedule}, "gradientAccumulation": "local", "gpusPerReplica": 4}
        (notes[schedule],) = [one for one in needs(**fields).remarks if one.startswith("parallelism.pp")]
    assert "(pp - 1) / (M + pp - 1) of the time, 15.8% of 16 rows" in notes["1F1B"]
    assert "keeps activations of 5.5 rows" in notes["Interleaved1F1B"]
    assert "(pp - 1) / (2 M + pp - 1) of the time, 8.6% of 16 rows" in notes["Interleaved1F1B"]
    assert "(pp - 1) / (6 M + pp - 1) of the time, 3.0% of 16 rows" in notes["ZBVZeroBubble"]


def test_stage_needs_less_memory_but_keeps_rows_in_flight() -> None:
    whole, staged = needs(gpusPerReplica=1), needs(gpusPerReplica=4, parallelism={"pp": 4})
    before, after = ({part.name: part.bytes for part in one.parts} for one in (whole, staged))
    assert after["parameters"] < 0.35 * before["parameters"]
    assert after["between stages"] > 0
    assert "between stages" not in before
    (remark,) = [remark for remark in staged.remarks if remark.startswith("parallelism.pp")]
    number = int(remark.split("number ")[1].split()[0])
    held = stages_of(LARGE, ParallelismConfig(pp=4))[number - 1]
    assert after["activations"] == pytest.approx(
        before["activations"] * held.rows * held.layers / LARGE.layers, rel=0.1
    )
    assert after["parameters"] == pytest.approx(4 * held.parameters)


def test_pipeline_replicas_shard_state_of_stage() -> None:
    alone, shared = (needs(gpusPerReplica=n, parallelism={"pp": 2}) for n in (2, 8))
    one, other = ({part.name: part.bytes for part in found.parts} for found in (alone, shared))
    assert other["optimizer state"] == pytest.approx(one["optimizer state"] / 4)
