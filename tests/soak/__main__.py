"""Soak test that CI does not run: `python -m tests.soak --runs 1000`.

Short runs of two and four ranks combine all tasks of a trainer: batches over the channel, steps, a version after each
of them, checkpoints in the background, and requests for its state. The exit code is 1 if a rank ended incorrectly. The
folder of that run is kept with the last frames of the crashed rank, and with its core file if
`/proc/sys/kernel/core_pattern` writes one.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.trainer.modeling.tiny_model import make_tiny_model
from tests.fixture_failures import KEPT
from tests.soak.runs import Outcome, Variant, play, variants
from tests.trainer.conftest import Zygote

FILL = "165"
"""Byte with which glibc fills memory on allocation, and with its complement on release, so that a use after free cannot
stay unnoticed."""
ENOUGH = 3
"""Number of failed runs after which no more runs start."""


@contextmanager
def workplace() -> Iterator[tuple[Path, Path, Zygote]]:
    """Provide a folder for runs, a model, and the process from which ranks are forked."""
    os.environ["MALLOC_PERTURB_"] = FILL  # for the ranks: it applies from the start of a process
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    with tempfile.TemporaryDirectory(prefix="rlrun-soak-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model", TinyModelConfig(hidden_size=32, layers=2))
        zygote = Zygote()
        try:
            yield folder, folder / "model", zygote
        finally:
            zygote.close()


def soak(runs: int, steps: int, seed: int) -> list[tuple[Variant, Outcome]]:
    """Play the runs; return those that failed."""
    failed: list[tuple[Variant, Outcome]] = []
    with workplace() as (folder, model, zygote):
        began = time.monotonic()
        for number, variant in enumerate(variants(runs, steps, seed), 1):
            root = folder / "run"
            outcome = play(variant, root, model, zygote)
            if outcome.failed:
                failed.append((variant, outcome))
                kept = KEPT / f"soak-{seed}-{number}"
                shutil.copytree(root, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
                print(f"run {number} {variant}: exit codes {outcome.codes}, kept in {kept}\n{outcome.told}", flush=True)
            shutil.rmtree(root, ignore_errors=True)
            if number % 10 == 0 or number == runs or len(failed) == ENOUGH:
                seconds = time.monotonic() - began
                print(f"{number} runs in {seconds:.0f} s, {len(failed)} of them failed", flush=True)
            if len(failed) == ENOUGH:
                break
    return failed


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Many short runs of the trainer.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of how the runs differ")
    options = parser.parse_args(argv)
    return 1 if soak(options.runs, options.steps, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
