"""Recomputed steps: bitwise equal to the run, without changes to its folder, with an explained sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlrun.algorithms import LOSSES, LossBatch, Mixture, Objective
from rlrun.config.algorithm.names import LOSS_ENTRIES
from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.language_models import CriticConfig, LoRAConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig, LossConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import config_fingerprint
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, read_batch, write_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, describe_part, write_manifest
from rlrun.protocol.files.paths import RunPaths
from rlrun.replay.step_replay import replay_step
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.run_objective import Update, bind_objective
from rlrun.trainer.modeling.shared_model import load_policy
from rlrun.trainer.process import Link, SharedObjects
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.ranks.launch import Job
from rlrun.trainer.recompute import Keeping, Recomputation, explain_sample
from rlrun.trainer.trained_run import Run
from tests.support.sets import few_in_gate

STEPS = 4
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "updates": {"updates_per_step": 2, "epochs_per_step": 2, "algorithm": AlgorithmConfig(preset="decoupled_ppo")},
    "mixed": {
        "micro_batch_tokens": 32,
        "environment_algorithms": {"random": EnvironmentAlgorithm(loss=LossConfig(name="ppo"))},
    },
    "lora": {"lora": LoRAConfig(rank=2)},
    "critic": {"algorithm": AlgorithmConfig(preset="ppo", critic=CriticConfig())},
    "sft": {"task": "SFT", "algorithm": AlgorithmConfig(preset="sft")},
}


@pytest.fixture
def make_run(tmp_path: Path, source: Path, solo: Group, rewarded: Callable[..., Batch]) -> Callable[..., RunPaths]:
    """Return a function that trains a run on recorded batches, with checkpoints of steps 2 and 4."""

    def make(**changes: Any) -> RunPaths:
        root = tmp_path / "run"
        values: dict[str, Any] = {
            "name": "test",
            "uid": "uid",
            "output_dir": str(root),
            "model": ModelConfig(path=str(source), dtype="float32"),
            "max_steps": STEPS,
            "seq_len": 32,
            "micro_batch_tokens": 16,
            "seed": 0,
            "algorithm": AlgorithmConfig(),
            "optimizer": OptimizerConfig(lr=1e-2),
            "checkpoint": CheckpointConfig(interval=2, save_async=False),
        }
        config, paths = TrainerConfig(**values | changes), RunPaths(root)
        attempt = first_attempt(world_size=1, config_hash=config_fingerprint(config))
        write_attempt(paths, attempt)
        paths.run_json.write_text(json.dumps({"trainer": config.model_dump(mode="json")}))
        policy = load_policy(config, str(source), solo, with_weights=True, check=check_model)
        process = SharedObjects(policy, lambda: None, lambda *_: None)
        run = Run(config, attempt, bind_objective(config), process, Link(replay=True), output_dir=root)
        run.publish_base()
        for step in range(1, STEPS + 1):
            write_batch(paths.batch(step, 1), rewarded((9, 4, 13, 6), step=step))
            run.step(paths.batch(step, 1))
        run.close(wait=True)
        for step in (2, 4):  # like the completing thread after its permission
            folder = paths.checkpoint(step, 1)
            write_manifest(folder, Manifest(step, 1, 1, "h", tuple(describe_part(folder, folder / "trainer")), 0.0))
        return paths

    return make


@pytest.fixture
def here(solo: Group) -> Callable[[TrainerConfig, Path, Job], None]:
    """Compute in this process instead of separate ranks."""

    def start(config: TrainerConfig, file: Path, job: Job) -> None:
        moved = config.model_copy(update={"output_dir": str(file.parent)})
        Path(job.output).write_text(
            json.dumps(Recomputation(moved, Job.parse_argument(job.rank_arguments()[1]), solo).run())
        )

    return start


def content(root: Path) -> dict[str, str]:
    """Return every file with a digest of its bytes."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", few_in_gate(RUNS, ("plain", "critic", "lora")))
def test_replayed_step_is_bitwise_equal_without_writing(
    kind: str, make_run: Callable[..., RunPaths], here: Callable[..., None]
) -> None:
    paths = make_run(**RUNS[kind])
    before = content(paths.root)
    found = replay_step(paths.root, 4, sample="1", start=here)
    assert content(paths.root) == before
    assert found.code == exit_codes.OK, found.text()
    assert found.plan.start == paths.checkpoint(2, 1)
    verdicts = {row.name: row.verdict for row in found.rows}
    assert verdicts["loss"] == verdicts["grad_norm"] == verdicts["param_checksum"] == "equal"
    assert {*verdicts.values()} == {"equal"}
    assert found.weights is not None
    assert found.weights["different"] == 0 < found.weights["tensors"]
    assert "step 4 is the same, bit for bit" in found.text()
    assert found.objective is not None
    trained = read_batch(paths.batch(4, 1)).samples[1]
    assert found.objective["positions"] == trained.loss_mask.nonzero()[0].tolist()
    assert found.objective["tokens"]["sampled_logprob"] == trained.logprobs[trained.loss_mask].tolist()
    assert found.document()["equal"] is True


def test_replay_from_model_detects_changed_batch(make_run: Callable[..., RunPaths], here: Callable[..., None]) -> None:
    paths = make_run()
    assert replay_step(paths.root, 1, start=here).code == exit_codes.OK
    batch = paths.batch(3, 1)
    whole = read_batch(batch)
    first, *others = whole.samples
    first = replace(first, advantages=first.advantages + first.loss_mask)
    changed = replace(whole, samples=(first, *others))
    write_batch(batch, changed)
    found = replay_step(paths.root, 4, start=here)
    assert found.code == exit_codes.FAILURE
    assert "earlier difference in step 3: loss is different: by" in found.text()
    assert "step 4 is DIFFERENT" in found.text()


def test_replay_without_recorded_metrics_is_refused(
    make_run: Callable[..., RunPaths], here: Callable[..., None]
) -> None:
    paths = make_run()
    paths.metrics.write_text(
        "".join(line + "\n" for line in paths.metrics.read_text().splitlines() if '"step": 3' not in line)
    )
    found = replay_step(paths.root, 3, start=here)
    assert found.code == exit_codes.DATA
    assert "no record to compare with" in found.text()


@pytest.mark.parametrize("name", LOSSES)
def test_sample_terms_sum_to_loss_and_gradient(name: str, rewarded: Callable[..., Batch]) -> None:
    batch, rng = rewarded((9, 4, 13, 6)), np.random.default_rng(0)
    reads = "proximal_logprobs" in LOSS_ENTRIES[name].reads
    loss = Keeping.from_mixture(Mixture(Objective(name, proximal="recompute" if reads else "inference")))
    mask = torch.tensor(np.concatenate([sample.loss_mask for sample in batch.samples]))
    values: dict[str, Tensor] = {
        key: torch.tensor(np.where(mask, -rng.random(len(mask)) - 1, 0), dtype=torch.float32)
        for key in ("now", "inference_logprobs", "proximal_logprobs", "reference_logprobs")
    }
    now = values.pop("now").requires_grad_()
    lengths, environments = [len(sample) for sample in batch.samples], ["random"] * 4
    output = loss(
        now,
        LossBatch(
            mask=mask,
            sequence_lengths=lengths,
            entropy=torch.zeros_like(now),
            advantages=torch.tensor(np.concatenate([sample.advantages for sample in batch.samples])),
            versions=torch.zeros(len(mask), dtype=torch.long),
            policy_version=0,
            **values,
        ),
        environments=environments,
        divisors=loss.divisors(mask, lengths, environments),
    )
    output.loss.backward()
    found = [explain_sample(loss, [Update(batch, [tuple(range(4))])], sample) for sample in batch.samples]
    assert all(one is not None and one["loss"] == name for one in found)
    share = sum(sum(one["tokens"]["share_of_loss"]) for one in found if one is not None)
    assert share == pytest.approx(float(output.loss.detach()), rel=1e-5, abs=1e-7)
    slopes = [slope for one in found if one is not None for slope in one["tokens"]["slope"]]
    assert now.grad is not None
    torch.testing.assert_close(torch.tensor(slopes), now.grad[mask], rtol=1e-5, atol=1e-7)


def test_sample_of_another_rank_is_not_explained(
    rewarded: Callable[..., Batch], make_model: Callable[..., nn.Module]
) -> None:
    batch = rewarded((9, 4))
    assert explain_sample(Keeping.from_mixture(Mixture(Objective())), [Update(batch, [(0,)])], batch.samples[1]) is None
