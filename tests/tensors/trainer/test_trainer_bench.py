"""Table of `--bench`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer import bench as bench_module
from rlrun.trainer.bench import Measurement, _make_measurement, fake_batch, markdown_table, run_bench
from rlrun.trainer.modeling.flops import Cost
from rlrun.trainer.modeling.packed_attention import implementation_name
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.ranks.launch import BenchOptions

CPU = torch.device("cpu")


def test_bench_row_contains_means_deviations_and_dashes() -> None:
    known = Measurement(8192, 16384, [1.0, 2.0], [0.4, 0.2], 3 * 2**30)
    unknown = Measurement(64, 64, [0.5], None, 2**29)
    lines = markdown_table([known, unknown], "title").splitlines()
    assert lines[0] == "title"
    assert lines[-2] == "| 8192 | 16384 | 30.0 ± 14.1 | 12288 ± 5793 | 1.500 ± 0.707 | 3.00 |"
    assert lines[-1] == "| 64 | 64 | - | 128 ± 0 | 0.500 ± 0.000 | 0.50 |"


def test_bench_on_cpu_reports_no_mfu(solo: Group) -> None:
    found = _make_measurement(16, fake_batch(16, 2, 50), [0.1], Cost(100, 1), solo, graphs=0, late_graphs=0)
    assert (found.mfu, found.tokens, found.seq_len) == (None, 32, 16)
    assert found.peak_memory > 1e6


PEAKS = """
import torch
from rlrun.trainer.bench import _peak_memory, _reset_peak
device = torch.device("cpu")
_reset_peak(device)
before = _peak_memory(device)
block = torch.ones(2**24)
full = _peak_memory(device)
del block
_reset_peak(device)
print(full - before, _peak_memory(device) - before)
"""


@pytest.mark.full
def test_peak_memory_starts_at_the_last_reset() -> None:
    # Run in a separate process, because memory of earlier tests may be released at any time.
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    full, after = map(float, done.stdout.split())
    assert full > 0.9 * 2**26
    assert after < 2**24


def test_fake_samples_are_valid_and_fully_trained() -> None:
    batch = fake_batch(12, 3, 50)
    for sample in batch.samples:
        sample.check()
    assert batch.loss_tokens == 3 * 11
    assert batch.tokens == 36
    assert max(int(sample.input_ids.max()) for sample in batch.samples) < 50


def config_of(source: Path, **fields: Any) -> TrainerConfig:
    common = {"name": "b", "uid": "b", "output_dir": str(source), "max_steps": 1, "seq_len": 16, "seed": 0}
    return TrainerConfig.model_validate(
        common | {"model": {"path": str(source)}, "algorithm": {}, "checkpoint": {}} | fields
    )


def test_measured_model_uses_the_kernel_of_the_run(source: Path, solo: Group) -> None:
    for asked in ("auto", "sdpa"):
        config = config_of(source, attention=asked)
        made = bench_module._random_model(config, config.model, str(source), solo)
        assert made.config._attn_implementation == implementation_name("sdpa")
    config = config_of(source).model_copy(update={"attention": "fa3"})
    with pytest.raises(RoleError, match=r"trainer\.attention \(fa3\): it needs a GPU of compute capability 9\.x"):
        bench_module._random_model(config, config.model, str(source), solo)


def test_graphs_compiled_during_measurement_are_reported(
    source: Path, solo: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = iter([3, 5])
    monkeypatch.setattr(bench_module, "graphs_compiled", lambda: next(compiled))
    monkeypatch.setattr(bench_module, "process_group", lambda *_: contextlib.nullcontext(solo))
    output = tmp_path / "out.json"
    options = BenchOptions(seq_lens=(8,), steps=1, warmup=1, output=str(output))
    assert run_bench(config_of(source, activation_checkpointing="full"), options) == 0
    written = json.loads(output.read_text())
    assert [(one["graphs"], one["late_graphs"]) for one in written["measurements"]] == [(3, 2)]
    assert f"attention sdpa, activations full, torch {torch.__version__}" in written["title"]
