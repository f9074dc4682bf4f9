"""`trainer.router` of a manifest: refusals over several blocks, and the roles that replay or return experts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig, config_fingerprint

GPU: dict[str, Any] = {"inference": {"gpus_per_replica": 1}}


def spec(replay: str, **changes: Any) -> RLRunSpec:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "environments": [{"id": "x"}],
        "trainer": {"router": {"replay": replay}, "updates_per_step": 2},
    }
    return RLRunSpec(**base | changes)


@pytest.mark.parametrize(
    ("replay", "changes", "message"),
    [
        ("Rollout", {}, "needs engines on GPUs, because vLLM's build for CPUs does not return experts"),
        (
            "Rollout",
            {"task": "SFT", "environments": [], "data": {"sources": [{"path": "d"}]}},
            "needs tokens that an engine sampled for training, but task is SFT; set trainer.router.replay: Off",
        ),
        (
            "Step",
            {"algorithm": {"proximal": "inference"}},
            "needs the pass of algorithm.proximal: recompute, but proximal is inference",
        ),
    ],
)
def test_replay_without_its_source_is_refused(replay: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(replay, **changes)
    (error,) = refused.value.errors()
    assert f"trainer.router.replay ({replay})" in error["msg"]
    assert message in error["msg"]


def test_step_replay_in_other_rows_is_refused() -> None:
    router = {"router": {"replay": "Step"}, "updates_per_step": 2, "epochs_per_step": 3}
    with pytest.raises(
        ValidationError, match=r"epochsPerStep \(3\) with updatesPerStep \(2\) divides the samples into other rows"
    ):
        spec("Step", trainer=router)
    assert (
        spec("Step", trainer=router | {"updates_per_step": 1}, algorithm={"preset": "gspo"}).trainer.epochs_per_step
        == 3
    )


@pytest.mark.parametrize(("replay", "expected"), [("Rollout", True), ("Step", False), ("Off", False)])
def test_only_rollout_replay_requests_experts_of_engines(replay: str, expected: bool) -> None:
    config = resolve_spec(spec(replay, algorithm={"preset": "gspo"}, **GPU), name="r", uid="u", output_dir="/r")
    assert config.inference is not None
    assert config.inference.return_routes is expected
    assert config.orchestrator.replay_routes is expected
    assert config.trainer.router.replay == replay


OF_LAST_RELEASE = ("20d3acb41626f202", "60681f66321c0055")
"""Fingerprints of the run and of its trainer's section, from the last release without `trainer.router`."""


def test_upgrade_keeps_the_fingerprint_of_a_run_without_replay() -> None:
    def resolved(**changes: Any) -> RunConfig:
        base: dict[str, Any] = {"model": {"path": "/models/a"}, "environments": [{"id": "reverse-text"}]}
        return resolve_spec(RLRunSpec(**base | changes), name="run", uid="u", output_dir="/r")

    config = resolved()
    assert (config.config_hash(), config_fingerprint(config.trainer)) == OF_LAST_RELEASE
    step = {"router": {"replay": "Step"}, "updates_per_step": 2}
    changed = resolved(trainer=step, algorithm={"preset": "gspo"})
    plain = resolved(trainer={"updates_per_step": 2}, algorithm={"preset": "gspo"})
    assert config_fingerprint(changed.trainer) != config_fingerprint(plain.trainer)
    own = resolved(model={"path": "/models/a", "class": "my_package.models:Gated"})
    assert config_fingerprint(own.trainer) != config_fingerprint(config.trainer)
