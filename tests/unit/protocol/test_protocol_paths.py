"""File names on the volume. They are part of the protocol, so the tests contain them literally."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths


def test_paths_match_protocol_names(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    names = {
        paths.run_json: "run.json",
        paths.attempt_file(3): "attempts/0003.json",
        paths.batch(123, 3): "rollouts/step_00000123.a0003",
        paths.version(0, 12345): "weights/v00000000.a12345",
        paths.delta(123, 3): "weights/d00000123.a0003",
        paths.checkpoint(120, 3): "checkpoints/step_00000120.a0003",
        paths.trace(7): "traces/step_00000007.jsonl",
        paths.evaluation_trace(0): "traces/eval_00000000.jsonl",
        paths.logs(3, "trainer"): "logs/attempt_0003/trainer",
        paths.metrics: "metrics.jsonl",
        paths.model: "model",
    }
    assert {str(path.relative_to(tmp_path)): name for path, name in names.items()} == {n: n for n in names.values()}


def test_listing_returns_named_artifacts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step, attempt in ((20, 1), (5, 10001), (20, 2)):
        paths.batch(step, attempt).mkdir(parents=True)
    assert [(a.step, a.attempt, a.path) for a in paths.batches_on_disk()] == [
        (5, 10001, paths.batch(5, 10001)),
        (20, 1, paths.batch(20, 1)),
        (20, 2, paths.batch(20, 2)),
    ]


@pytest.mark.parametrize(
    "name",
    ["step_00000001.a0001.tmp", "step_1.a0001", "step_00000001", "v00000001.a0001", ".nfs0001", "step_00000001.a1"],
)
def test_anything_else_in_the_folder_is_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / "rollouts" / name).mkdir(parents=True)
    assert RunPaths(tmp_path).batches_on_disk() == []


def test_weights_exist_when_they_are_marked_complete(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.version(1, 1).mkdir(parents=True)
    assert paths.versions_on_disk() == []
    (paths.version(1, 1) / COMPLETE).touch()
    assert [a.step for a in paths.versions_on_disk()] == [1]


def test_listings_exclude_deltas_from_versions_and_incomplete_deltas(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    half = paths.delta(2, 1).with_name(paths.delta(2, 1).name + TMP_SUFFIX)
    for folder in (paths.delta(1, 1), half):
        folder.mkdir(parents=True)
        assert paths.deltas_on_disk() == []
    for folder in (paths.delta(1, 1), half):
        (folder / COMPLETE).touch()
    assert [a.path for a in paths.deltas_on_disk()] == [paths.delta(1, 1)]
    assert paths.versions_on_disk() == []


def test_empty_volume_lists_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "none")
    assert paths.batches_on_disk() == paths.versions_on_disk() == paths.checkpoints_on_disk() == []
    assert paths.attempts_on_disk() == []
