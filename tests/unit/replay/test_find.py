"""Inputs for the replay of a step: the nearest checkpoint of the lineage, or an error with the missing part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import config_fingerprint
from rlrun.protocol.files.attempts import first_attempt, next_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, describe_part, write_manifest
from rlrun.protocol.files.paths import RunPaths
from rlrun.replay.sample_explanation import index_of
from rlrun.replay.step_files import ReplayError, find_step, read_run, show_spans
from rlrun.replay.step_replay import compare_quantities, rows_table, weights_verdict
from rlrun.runtime import exit_codes


def config(root: Path, **changes: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "name": "run",
        "uid": "uid",
        "output_dir": str(root),
        "model": ModelConfig(path="tiny", dtype="float32"),
        "max_steps": 20,
        "seq_len": 32,
        "seed": 0,
        "algorithm": AlgorithmConfig(),
        "checkpoint": CheckpointConfig(),
    }
    return TrainerConfig(**values | changes)


def sample(task: str, rollout: int) -> Sample:
    mask = np.array([False, True])
    zeros = np.zeros(2, np.float32)
    return Sample(
        np.zeros(2, np.int32), mask, zeros, np.array([-1, 0], np.int32), zeros, 1.0, "a", task, 4, rollout, 0, 0.5
    )


def checkpoint(paths: RunPaths, step: int, attempt: int) -> None:
    folder = paths.checkpoint(step, attempt)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "shard").write_text("x")
    write_manifest(folder, Manifest(step, attempt, 1, "h", tuple(describe_part(folder, folder / "trainer")), 0.0))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Attempt 1 trained steps 1 to 9 and saved 4 and 8; attempt 2 continued from 4 and trained 5 to 7. Batches exist from step 5."""
    made = RunPaths(tmp_path / "run")
    made.attempts.mkdir(parents=True)
    made.run_json.write_text(json.dumps({"trainer": config(made.root).model_dump(mode="json")}))
    first = first_attempt(world_size=2, config_hash=config_fingerprint(config(made.root)))
    write_attempt(made, first)
    write_attempt(made, next_attempt(first, 4, attempt=2, world_size=1, config_hash="other"))
    for step, attempt in ((4, 1), (8, 1), (6, 2)):
        checkpoint(made, step, attempt)
    for step, attempt in ((5, 1), (9, 1), (5, 2), (6, 2), (7, 2)):
        write_batch(made.batch(step, attempt), Batch(step, attempt, (sample("t", 0),)))
    made.metrics.write_text("".join(json.dumps({"step": n, "loss": n / 2}) + "\n" for n in range(1, 8)) + '{"step": 8')
    return made


def test_replay_starts_at_nearest_checkpoint_of_lineage(paths: RunPaths) -> None:
    plan = find_step(paths.root, 7)
    assert (plan.start, plan.start_step) == (paths.checkpoint(6, 2), 6)
    assert plan.batches == ((7, paths.batch(7, 2)),)
    assert (plan.attempt.attempt, plan.end, plan.reconfigured) == (2, None, True)
    assert plan.lines == {7: {"step": 7, "loss": 3.5}}
    plan = find_step(paths.root, 6)
    assert (plan.start, plan.end) == (paths.checkpoint(4, 1), paths.checkpoint(6, 2))
    assert plan.batches == ((5, paths.batch(5, 2)), (6, paths.batch(6, 2)))


def test_missing_batch_error_names_option_that_keeps_batches(paths: RunPaths) -> None:
    with pytest.raises(ReplayError, match=r"rollouts/step_00000001\.a0001 is not on the volume") as error:
        find_step(paths.root, 3)
    assert error.value.code == exit_codes.DATA
    assert "keep all batches with orchestrator.recordRollouts: true" in str(error.value)
    assert "can be replayed: 5 to 7" in str(error.value)


def test_explanation_needs_only_batch_of_its_step(paths: RunPaths) -> None:
    shutil.rmtree(paths.checkpoint(6, 2))
    shutil.rmtree(paths.batch(5, 2))
    with pytest.raises(ReplayError, match="cannot be replayed"):
        find_step(paths.root, 7)
    assert find_step(paths.root, 7, computes=False).batches == ((7, paths.batch(7, 2)),)
    with pytest.raises(ReplayError, match=r"the batch of step 5 is not on the volume; .*steps with a batch: 6 to 7"):
        find_step(paths.root, 5, computes=False)


def test_damaged_checkpoint_is_refused_by_name(paths: RunPaths) -> None:
    (paths.checkpoint(6, 2) / "trainer" / "shard").unlink()
    with pytest.raises(ReplayError, match=r"step_00000006.a0002: trainer/shard is missing"):
        find_step(paths.root, 7)


def test_untrained_step_is_refused(paths: RunPaths) -> None:
    with pytest.raises(ReplayError, match="has not trained step 9 yet; its newest step is 7") as error:
        find_step(paths.root, 9)
    assert error.value.code == exit_codes.USAGE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "Eval"}, "has no training steps"),
        ({"shared_with": "host", "lora": LoRAConfig()}, "is trained by host"),
    ],
)
def test_run_without_own_steps_is_refused(paths: RunPaths, changes: dict[str, Any], said: str) -> None:
    paths.run_json.write_text(json.dumps({"trainer": config(paths.root, **changes).model_dump(mode="json")}))
    with pytest.raises(ReplayError, match=said):
        read_run(paths.root)


def test_folder_without_run_or_settings_is_refused(tmp_path: Path, paths: RunPaths) -> None:
    with pytest.raises(ReplayError, match="does not contain a run"):
        read_run(tmp_path)
    paths.run_json.unlink()
    with pytest.raises(ReplayError, match=r"has neither run\.json nor the trainer's config\.json"):
        read_run(paths.root)


def test_sample_is_found_by_index_group_or_task() -> None:
    batch = Batch(3, 1, (sample("t", 0), sample("t", 1), sample("u", 2)))
    assert [index_of(batch, word) for word in ("1", "4/1", "u")] == [1, 1, 2]
    for word, said in (("t", r"matches 2 samples: 0 \(4/0\), 1 \(4/1\)"), ("7", "use an index from 0 to 2")):
        with pytest.raises(ReplayError, match=said):
            index_of(batch, word)


def test_replay_compares_bits_or_within_tolerance() -> None:
    stored = {"loss": 1.0, "grad_norm": 2.0, "param_checksum": 5.0, "entropy": 0.0}
    computed = {"loss": 1.0, "grad_norm": 2.0005, "param_checksum": 6.0, "entropy": 1e-6, "time/step": 1.0, "new": 1.0}
    exact = compare_quantities(3, stored, computed, tolerance=None)
    assert [row.name for row in exact] == ["loss", "grad_norm", "param_checksum", "entropy", "new"]
    assert [row.verdict for row in exact] == ["equal", "different", "different", "different", "unknown"]
    near = compare_quantities(3, stored, computed, tolerance=1e-3)
    assert [row.verdict for row in near] == ["equal", "within", "unknown", "within", "unknown"]
    assert [row.verdict for row in compare_quantities(3, stored, {"loss": 1.1}, tolerance=1e-3)] == ["different"]
    assert "within the tolerance: by 0.0005" in rows_table(near)[2]
    assert weights_verdict({"different": 1, "largest": 1e-7}, tolerance=None) == "different"
    assert weights_verdict({"different": 1, "largest": 1e-7}, tolerance=1e-3) == "within"


def test_steps_in_words() -> None:
    assert (show_spans([1, 2, 3, 7]), show_spans([])) == ("1 to 3, 7", "none")
