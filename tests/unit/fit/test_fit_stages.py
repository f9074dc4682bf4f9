"""Stages of a pipeline: their cut, and the memory of the one that needs most."""

from __future__ import annotations

from itertools import combinations

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.fit.gpu_products import GIB
from rlrun.fit.known_models import KNOWN
from rlrun.fit.parts import Needs
from rlrun.fit.report import Surroundings, needs_of
from rlrun.fit.stages import cut, stages_of

LARGE, MIXTURE = KNOWN["Qwen/Qwen3-8B"], KNOWN["Qwen/Qwen3-30B-A3B"]


def needs(**fields: object) -> Needs:
    run = {"model": {"name": "Qwen/Qwen3-8B"}, "environments": [{"id": "gsm8k"}], "seqLen": 4096, "trainer": fields}
    memory = {"trainer": 80 * GIB, "inference": 80 * GIB}
    (found,) = needs_of(RLRunSpec.model_validate(run), Surroundings(LARGE, memory=memory))
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("costs", [[1.0] * 6, [3, 1, 1, 1, 1, 3], [1, 5, 1, 1, 1, 1], [2, 2, 2, 1, 9, 1]])
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[float], stages: int) -> None:
    head = 2.5

    def dearest(ends: tuple[int, ...]) -> float:
        bounds = [*zip((0, *ends), (*ends, len(costs)), strict=True)]
        return max(sum(costs[start:end]) + head * (end == len(costs)) for start, end in bounds)

    runs = cut(costs, head, stages)
    assert [number for run in runs for number in run] == [*range(6)]
    assert all(runs)
    best = min(map(dearest, combinations(range(1, 6), stages - 1)))
    assert dearest(tuple(run.start for run in runs[1:])) == best


def test_the_first_stage_is_spared_where_cuts_are_equal() -> None:
    assert [len(run) for run in cut([1] * 5, 0, 2)] == [2, 3]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        cut([1, 1], 0, 3)


def test_stages_have_the_whole_model_between_them() -> None:
    for model in (LARGE, MIXTURE):
        stages = stages_of(model, 4)
        assert sum(stage.parameters for stage in stages) == pytest.approx(model.parameters, rel=1e-6)
        assert [stage.rows for stage in stages] == [4, 3, 2, 1]
        assert [stage.links for stage in stages] == [1, 2, 2, 1]
        (whole,) = stages_of(model, 1)
        assert whole.parameters == model.parameters


def test_a_stage_needs_less_than_a_model_and_keeps_the_rows_in_flight() -> None:
    whole, staged = needs(gpusPerReplica=1), needs(gpusPerReplica=4, parallelism={"pp": 4})
    before, after = ({part.name: part.bytes for part in one.parts} for one in (whole, staged))
    assert after["parameters"] < 0.35 * before["parameters"]
    assert after["between stages"] > 0
    assert "between stages" not in before
    (remark,) = [remark for remark in staged.remarks if remark.startswith("parallelism.pp")]
    number = int(remark.split("number ")[1].split()[0])
    held = stages_of(LARGE, 4)[number - 1]
    assert after["activations"] == pytest.approx(
        before["activations"] * held.rows * held.layers / LARGE.layers, rel=0.1
    )
    assert after["parameters"] == pytest.approx(4 * held.parameters)


def test_copies_of_a_pipeline_share_what_a_stage_has() -> None:
    alone, shared = (needs(gpusPerReplica=n, parallelism={"pp": 2}) for n in (2, 8))
    one, other = ({part.name: part.bytes for part in found.parts} for found in (alone, shared))
    assert other["optimizer state"] == pytest.approx(one["optimizer state"] / 4)
