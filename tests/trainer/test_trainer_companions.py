"""PPO with critic, reference and two passes of two updates per step on real ranks: equal over ranks and bitwise equal after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from rlrun.config.models.language_models import CriticConfig, LoRAConfig, ReferenceConfig
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig, RegularizerConfig

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {
    "algorithm": AlgorithmConfig(
        preset="ppo",
        advantage=AdvantageConfig(name="gae", options={"lam": 0.95}),
        proximal="recompute",
        critic=CriticConfig(lr=1e-3),
        reference=ReferenceConfig(),
        regularizers=RegularizerConfig(kl=0.1),
    ),
    "updates_per_step": 2,
    "epochs_per_step": 2,
    "max_steps": 4,
}
METRICS = (
    "loss",
    "grad_norm",
    "reference_kl",
    "value_loss",
    "critic_grad_norm",
    "value_clip_fraction",
    "explained_variance",
    "value_mean",
    "return_mean",
)


def test_ppo_run_matches_across_ranks_and_resume(make_run: Callable[[str], Any], recorded: Path) -> None:
    expected = make_run("one").train(ranks=1, replay=recorded, **OPTIONS)
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    assert expected[0]["reference_kl"] != expected[-1]["reference_kl"]
    assert expected[0]["value_mean"] == 0.0 != expected[-1]["value_mean"]
    run = make_run("two")
    whole = run.train(ranks=2, replay=recorded, **OPTIONS)
    for one, two in zip(expected, whole, strict=True):
        for metric in METRICS:
            assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-4), (one["step"], metric)

    resumed = make_run("resumed")
    resumed.train(attempt=1, ranks=2, replay=recorded, **(OPTIONS | {"max_steps": 2}))
    found = resumed.train(attempt=2, ranks=2, replay=recorded, **OPTIONS)
    assert [line["attempt"] for line in found] == [1, 1, 2, 2]
    for one, other in zip(whole, found, strict=True):
        for metric in (*METRICS, "param_checksum"):
            assert other[metric] == one[metric], (one["step"], metric)


def test_adapters_train_with_a_fully_trained_critic(make_run: Callable[[str], Any], recorded: Path) -> None:
    options = OPTIONS | {"max_steps": 2, "lora": LoRAConfig(rank=4, alpha=8)}
    one, two = (make_run(str(ranks)).train(ranks=ranks, replay=recorded, **options) for ranks in (1, 2))
    for mine, other in zip(one, two, strict=True):
        for metric in METRICS:
            assert other[metric] == pytest.approx(mine[metric], rel=1e-3, abs=1e-4), (mine["step"], metric)
    assert one[0]["value_mean"] == 0.0 != one[1]["value_mean"]
    assert one[0]["reference_kl"] != one[1]["reference_kl"], "the policy moves away from the reference"

    saved = FileSystemReader(make_run("2").paths.checkpoint(2, 1) / "trainer").read_metadata().state_dict_metadata
    names = {part: [name for name in saved if name.startswith(f"{part}.model.")] for part in ("policy", "critic")}
    assert names["policy"]
    assert all(name.endswith(("lora_A", "lora_B")) for name in names["policy"])
    assert "critic.model.model.norm.weight" in names["critic"]
    assert not [name for name in names["critic"] if "lora" in name]
