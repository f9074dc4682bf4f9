"""Mean reward over the steps of every preset, on a tiny policy: the curves on the pages of algorithms.

    python -m benchmarks.preset_curves [--steps 40] [--seeds 2] [--presets NAME ...] [--write]

A policy of 64 channels that answers `reverse-text` (three letters out of two) correctly in about half of its answers, 8
groups of 8 rollouts a step, two updates on each, the product's own advantages and losses. The curves show that a preset
learns and how steadily; they rank nothing: one learning rate for all, one small task. `--write` writes them to
benchmarks/results/preset_curves.json, where presets without a new measurement are kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from rlrun.config.algorithm.names import PRESETS
from tests.trainer.preset_learning import make_policy, train

RESULTS = Path(__file__).parent / "results" / "preset_curves.json"
STUDENT, TEACHER = 0.6, 0.9
"""Accuracy at which the warm-up of each policy ends."""


def measure(presets: list[str], steps: int, seeds: int) -> dict[str, list[list[float]]]:
    """Return rewards `[seeds][steps + 1]` by preset; the first is that before any update."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        student, teacher = make_policy(Path(folder) / "s", STUDENT), make_policy(Path(folder) / "t", TEACHER)
        found = {}
        for preset in presets:
            began = time.monotonic()
            curves = [train(preset, student, teacher, sign=1.0, steps=steps, whole=True, seed=s) for s in range(seeds)]
            found[preset] = [[round(reward, 4) for reward in curve] for curve in curves]
            ends = ", ".join(f"{curve[0]:.2f} to {sum(curve[-5:]) / 5:.2f}" for curve in curves)
            print(f"{preset}: {ends} in {time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> None:
    """Measure the named presets, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--write", action="store_true", help="keep the curves")
    options = parser.parse_args()
    found = measure(options.presets, options.steps, options.seeds)
    if options.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        ordered = {name: (kept | found)[name] for name in PRESETS if name in kept | found}
        RESULTS.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in ordered.items()) + "\n}\n")


if __name__ == "__main__":
    main()
