"""Beyond what CI runs: `python -m tests.soak --runs 1000`.

Short runs of two and four ranks, each with all that a trainer does at once: batches over the channel, steps, a version after each of them,
checkpoints in the background, questions after its state. Ends with 1 when a rank ended otherwise than it should; what that run left is
kept, with the last frames of the rank that crashed, and its core file where `/proc/sys/kernel/core_pattern` says.
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
"""glibc fills memory with it and its complement, when it is taken and given back: what is used too late is no longer right by luck."""
ENOUGH = 3
"""So many runs that failed are looked at before any more are played."""


@contextmanager
def workplace() -> Iterator[tuple[Path, Path, Zygote]]:
    """A folder for runs, a model for them, and the process that their ranks are forked from."""
    os.environ["MALLOC_PERTURB_"] = FILL  # for the ranks: it counts from the start of a process
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
    """Play so many runs; those that failed."""
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
    """Returns the exit code: 1 when a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Many short runs of the trainer.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of how the runs differ")
    options = parser.parse_args(argv)
    return 1 if soak(options.runs, options.steps, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
