"""Refusals of invalid batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.batch_feed import ReplayFeed, cut_metrics, read_checked

MakeBatch = Callable[..., Batch]


def read(path: Path, *, step: int = 1, seq_len: int = 32, attempt: int | None = 1) -> Batch:
    return read_checked(path, step=step, vocabulary=50, seq_len=seq_len, attempt=attempt)


def test_valid_batch_is_read(tmp_path: Path, make_batch: MakeBatch) -> None:
    write_batch(tmp_path / "b", make_batch([5, 7]))
    assert [len(sample) for sample in read(tmp_path / "b").samples] == [5, 7]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": 2}, "for step 1, the next step is 2"),
        ({"attempt": 2}, "attempt 1 wrote it"),
        ({"seq_len": 6}, "sample 1 has 7 tokens, seqLen is 6"),
    ],
)
def test_mismatched_batch_is_refused(
    tmp_path: Path, make_batch: MakeBatch, options: dict[str, int], reason: str
) -> None:
    write_batch(tmp_path / "b", make_batch([5, 7]))
    with pytest.raises(RoleError, match=reason) as caught:
        read(tmp_path / "b", **options)
    assert str(tmp_path / "b") in str(caught.value)
    assert caught.value.code == exit_codes.DATA


def test_token_of_future_version_is_refused(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    write_batch(tmp_path / "b", Batch(1, 1, (make_sample(5, version=1),)))
    with pytest.raises(RoleError, match="version 1, which step 1 cannot know"):
        read(tmp_path / "b")


def test_token_id_outside_the_vocabulary_is_refused(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    sample = make_sample(5)
    write_batch(tmp_path / "b", Batch(1, 1, (replace(sample, input_ids=sample.input_ids + 50),)))
    with pytest.raises(RoleError, match="vocabulary of 50"):
        read(tmp_path / "b")


def test_advantage_that_is_not_finite_is_refused(tmp_path: Path, make_batch: MakeBatch) -> None:
    write_batch(tmp_path / "b", make_batch([5, 7]))
    file = tmp_path / "b" / "samples.safetensors"
    columns = load_file(file)
    columns["advantages"][8] = np.nan
    save_file(columns, file)
    document = json.loads((tmp_path / "b" / "batch.json").read_text())
    for checksum in ("samples_crc32", "crc32"):  # like a release that wrote no checksums
        del document[checksum]
    (tmp_path / "b" / "batch.json").write_text(json.dumps(document))
    with pytest.raises(RoleError, match="sample 1: advantages contains a value that is not finite") as caught:
        read(tmp_path / "b")
    assert caught.value.code == exit_codes.DATA


def test_missing_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoleError, match="cannot read the batch"):
        read(tmp_path / "none")


def test_replay_uses_batch_of_the_latest_attempt(tmp_path: Path, make_batch: MakeBatch) -> None:
    paths = RunPaths(tmp_path)
    for attempt in (1, 2):
        write_batch(paths.batch(1, attempt), make_batch([5], attempt=attempt))
    feed = ReplayFeed(paths.rollouts)
    assert feed.take_batch(1, 0.0) == paths.batch(1, 2)
    with pytest.raises(RoleError, match="no batch of step 2"):
        feed.take_batch(2, 0.0)
    with pytest.raises(RoleError, match="contains no batches"):
        ReplayFeed(tmp_path)


def test_replay_truncates_metrics_with_partial_last_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    cut_metrics(paths, 0)
    assert not paths.metrics.exists()
    paths.metrics.write_text(
        '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step": 3, "loss": 1}\n{"step": Infinity}\n{"step": 4, "lo'
    )
    cut_metrics(paths, 2)
    assert paths.metrics.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n'
