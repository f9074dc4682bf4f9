"""Fake data of PRIME-RL: a run on fake data is a measurement of the trainer's step."""

from __future__ import annotations

from dataclasses import replace

from rlrun.config.loading.layers import Hint, Layer
from rlrun.config.loading.problems import Problem
from rlrun.trainer.bench_options import BenchOptions


def is_fake(layer: Layer) -> bool:
    """Return whether a layer selects fake data."""
    return _fake(layer) is not None


def _fake(layer: Layer) -> Hint | None:
    found = next((layer.hints[name] for name in ("data_type", "data_fake") if name in layer.hints), None)
    return None if found is None or found.value == "sft" or found.value is False else found


def fake_data(layer: Layer) -> BenchOptions | None:
    """Return the options of the measurement for a run on fake data; None for a run on real data."""
    fake = _fake(layer)
    if fake is None:
        return None
    origin = fake.origin
    message = "the run uses fake data, so the trainer's step is only measured, as with --bench"
    layer.notices.append(Problem(origin.source, origin.path, message, origin.line))
    steps, seq_len = layer.values.get("max_steps"), layer.values.get("seq_len", 2048)
    options = BenchOptions(steps=steps) if isinstance(steps, int) and 0 < steps < 1000 else BenchOptions()
    varied = "variable" in (fake.value, layer.hints["data_length"].value if "data_length" in layer.hints else None)
    if varied and isinstance(seq_len, int) and seq_len >= 8:
        return replace(options, seq_lens=(seq_len // 4, seq_len // 2, seq_len))
    return options
