"""Restrictions of colocated runs: the message names the field, its value and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec


def spec(**changes: Any) -> RLRunSpec:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "environments": [{"id": "x"}],
        "algorithm": {"max_async_level": 0},
        "placement": {"colocate": True},
    }
    return RLRunSpec(**base | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "SFT", "environments": [], "data": {"sources": [{"path": "d"}]}}, "needs task RL, but task is SFT"),
        ({"task": "Eval"}, "placement.colocate (true) needs task RL, but task is Eval; remove it"),
        ({"trainer": {"shared_with": "h", "lora": {}}}, "is set by the host (h) of trainer.sharedWith; remove it"),
        ({"trainer": {"lora": {"slots": 2}}}, "trainer.lora.slots (2) lets other runs use engines that sleep"),
        (
            {"algorithm": {}},
            "algorithm.maxAsyncLevel (2) must be 0 with placement.colocate, because engines sleep while",
        ),
        ({"weight_sync": {"transport": "NCCL"}}, "weightSync.transport (NCCL) needs two GPUs"),
        ({"inference": {"replicas": 3}}, "inference.replicas (3) must be trainer.replicas (1) with placement.colocate"),
        (
            {"trainer": {"gpus_per_replica": 1}},
            "inference.gpusPerReplica (0) must be trainer.gpusPerReplica (1) with placement.colocate",
        ),
        ({"inference": {"image": "i"}}, "inference.image (i) applies only to engines with their own pods; remove it"),
        ({"inference": {"min_available": 0}}, "inference.minAvailable (0) applies only to engines with their own pods"),
        (
            {"placement": {"colocate": True, "spread_inference": "None"}},
            "placement.spreadInference (None) applies only to engines with their own pods; remove it",
        ),
        (
            {"placement": {"colocate": True, "inference": {"pool": "p"}}},
            "applies only to engines with their own pods; remove it",
        ),
    ],
)
def test_unsupported_colocation_is_refused_with_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(**changes)
    (error,) = refused.value.errors()
    assert message in error["msg"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_colocated_engine_count_equals_trainer_pods(replicas: int) -> None:
    both = {"gpus_per_replica": 2}
    run = spec(
        trainer=both | {"replicas": 2}, inference=both | {"replicas": replicas, "tensor_parallel": 2}
    )  # one is the default
    config = resolve_spec(run, name="r", uid="u", output_dir="/r")
    assert config.inference is not None
    assert config.inference.replicas == 2
    assert all(role.colocated for role in (config.trainer, config.inference, config.orchestrator))


def test_placement_does_not_change_configuration_hash() -> None:
    def fingerprint(**changes: Any) -> str:
        return resolve_spec(spec(**changes), name="r", uid="u", output_dir="/r").config_hash()

    assert fingerprint() == fingerprint(placement={})
