"""The table of `--bench`."""

from __future__ import annotations

import torch

from rlrun.trainer.bench import Measurement, _measurement, _peak, _reset_peak, fake_batch, table
from rlrun.trainer.flops import Cost
from rlrun.trainer.group import Group

CPU = torch.device("cpu")


def test_a_row_holds_means_and_deviations_and_a_dash_for_what_is_not_known() -> None:
    known = Measurement(8192, 16384, [1.0, 2.0], [0.4, 0.2], 3 * 2**30)
    unknown = Measurement(64, 64, [0.5], None, 2**29)
    lines = table([known, unknown], "title").splitlines()
    assert lines[0] == "title"
    assert lines[-2] == "| 8192 | 16384 | 30.0 ± 14.1 | 12288 ± 5793 | 1.500 ± 0.707 | 3.00 |"
    assert lines[-1] == "| 64 | 64 | - | 128 ± 0 | 0.500 ± 0.000 | 0.50 |"


def test_no_share_of_a_peak_is_told_of_a_cpu(solo: Group) -> None:
    found = _measurement(16, fake_batch(16, 2, 50), [0.1], Cost(100, 1), solo)
    assert (found.mfu, found.tokens, found.seq_len) == (None, 32, 16)
    assert found.peak_memory > 1e6


def test_the_peak_is_that_since_the_last_reset() -> None:
    _reset_peak(CPU)
    before = _peak(CPU)
    block = torch.ones(2**24)
    assert _peak(CPU) - before > 0.9 * block.numel() * 4
    del block
    _reset_peak(CPU)
    assert _peak(CPU) - before < 2**24


def test_fake_samples_are_valid_and_train_on_every_token_but_the_first() -> None:
    batch = fake_batch(12, 3, 50)
    for sample in batch.samples:
        sample.check()
    assert batch.loss_tokens == 3 * 11
    assert batch.tokens == 36
    assert max(int(sample.input_ids.max()) for sample in batch.samples) < 50
