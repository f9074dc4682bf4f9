"""Batch files: exact round trips, and refusal of invalid batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.protocol.files.batch import Batch, BatchError, Dropped, Sample, Validation, read_batch, write_batch


def sample(length: int = 4, **changes: Any) -> Sample:
    mask = np.arange(length) >= 2
    values: dict[str, Any] = {
        "input_ids": np.arange(length, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, np.float32(-0.1) * np.arange(length, dtype=np.float32), np.float32(0)),
        "versions": np.where(mask, np.int32(3), np.int32(-1)),
        "advantages": np.where(mask, np.float32(0.25), np.float32(0)),
        "temperature": 0.7,
        "environment": "reverse-text",
        "task_id": "täsk 1",
        "group": 5,
        "rollout": 1,
        "dispatch_version": 2,
        "reward": 1.0,
    }
    return Sample(**values | changes)


def batch(*samples: Sample) -> Batch:
    return Batch(7, 2, samples or (sample(4), sample(9, group=6), sample(2)))


def same(left: Sample, right: Sample) -> bool:
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        for a, b in ((getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    )


def test_round_trip(tmp_path: Path) -> None:
    written = batch()
    write_batch(tmp_path / "b", written)
    read = read_batch(tmp_path / "b")
    assert (read.step, read.attempt) == (7, 2)
    assert all(same(a, b) for a, b in zip(written.samples, read.samples, strict=True))
    assert (read.tokens, read.loss_tokens, read.max_version) == (15, 2 + 7 + 0, 3)


def test_truncated_sample_is_marked(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", batch(sample(), sample(truncated=True)))
    assert [s.truncated for s in read_batch(tmp_path / "b").samples] == [False, True]
    entries = json.loads((tmp_path / "b" / "batch.json").read_text())["samples"]
    assert ["truncated" in entry for entry in entries] == [False, True]  # as older releases wrote it


def test_end_of_data_and_validation_are_stored(tmp_path: Path) -> None:
    write_batch(tmp_path / "plain", batch())
    plain = read_batch(tmp_path / "plain")
    assert (plain.total_steps, plain.last, plain.validation) == (None, False, None)
    around = Validation("/runs/x/rollouts/validation.a0001", before=True)
    write_batch(tmp_path / "last", replace(batch(), total_steps=7, last=True, validation=around))
    read = read_batch(tmp_path / "last")
    assert (read.total_steps, read.last, read.validation) == (7, True, around)


def test_dropped_groups_are_stored(tmp_path: Path) -> None:
    dropped = (Dropped(3, "too_easy", 1.0, 9), Dropped(8, "error", None, 10))
    write_batch(tmp_path / "b", replace(batch(), dropped=dropped, tasks=((4, 17), (5, 0))))
    read = read_batch(tmp_path / "b")
    assert (read.dropped, read.tasks) == (dropped, ((4, 17), (5, 0)))


def test_selected_samples_are_read(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", batch())
    read = read_batch(tmp_path / "b", indices=[2, 1])
    assert [len(s) for s in read.samples] == [2, 9]
    assert same(read.samples[1], batch().samples[1])


def test_numbers_of_numpy_are_plain_on_disk(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", batch(sample(reward=np.float32(0.5), group=np.int64(3))))
    entry = read_batch(tmp_path / "b").samples[0]
    assert (entry.reward, entry.group) == (0.5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, r"logprobs has shape \(3,\), input_ids has 4 tokens"),
        ({"loss_mask": np.array([True] * 4)}, r"loss_mask\[0\] is true"),
        ({"logprobs": np.array([0, 0, np.nan, -1], np.float32)}, "logprobs contains a value that is not finite"),
        ({"logprobs": np.array([0, 0, 0.5, -1], np.float32)}, "logprobs contains a positive value"),
        ({"advantages": np.array([0, 0, np.inf, 0], np.float32)}, "advantages contains a value that is not finite"),
        ({"versions": np.array([-1, -1, -1, 3], np.int32)}, "a trained token has no policy version"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_invalid_sample_is_refused_with_position(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=rf"sample 1 of step 7 \(reverse-text täsk 1\): {message}"):
        write_batch(tmp_path / "b", batch(sample(), sample(**changes)))
    assert list(tmp_path.iterdir()) == []


def test_single_token_sample_is_refused() -> None:
    one = sample(2)
    short = replace(
        one, **{n: getattr(one, n)[:1] for n in ("input_ids", "loss_mask", "logprobs", "versions", "advantages")}
    )
    with pytest.raises(BatchError, match="at least 2 tokens, got 1"):
        short.check()


def test_empty_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="at least one sample"):
        write_batch(tmp_path / "b", Batch(1, 1, ()))


def test_missing_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="cannot read the batch"):
        read_batch(tmp_path / "b")


@pytest.mark.parametrize("name", ["batch.json", "samples.safetensors"])
@pytest.mark.parametrize("keep", [0, 20, -3])
def test_truncated_batch_file_is_refused(tmp_path: Path, name: str, keep: int) -> None:
    write_batch(tmp_path / "b", batch())
    file = tmp_path / "b" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BatchError, match="cannot read the batch"):
        read_batch(tmp_path / "b")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", batch())
    file = tmp_path / "b" / "batch.json"
    document = json.loads(file.read_text())
    document["samples"].pop()
    file.write_text(json.dumps(document))
    with pytest.raises(BatchError, match="its checksum is wrong"):
        read_batch(tmp_path / "b")
    file.write_text(json.dumps(document | {"format_version": 9}))
    with pytest.raises(BatchError, match="has format 9, this version reads 1"):
        read_batch(tmp_path / "b")
