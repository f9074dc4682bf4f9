"""Proof that a trainer killed ten times ends like an undisturbed one: `python -m benchmarks.killed_trainer [--kills 10]
[--seed 0] [--write]`.

A real trainer (tiny model, CPU, groups of one and of two ranks) replays the same recorded batches twice: undisturbed,
and killed with SIGKILL several times in a random phase of a random step, saves included. The metrics of all steps and
the files of the last version are compared bit for bit.
"""

from __future__ import annotations

import platform
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.results_page import run_page
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tiny_model
from tests.trainer.conftest import Run, Zygote, record
from tests.trainer.kills import Blow, curve, final_weights, longest, survive

RESULTS = Path(__file__).parent / "results" / "killed_trainer.md"


def measure(folder: Path, zygote: Zygote, *, ranks: int, kills: int, seed: int) -> tuple[list[Blow], bool, bool, int]:
    """Return the kills, whether curve and weights equal those of the undisturbed run, and the number of steps."""
    steps = longest(kills)
    batches = record(folder / "recorded", steps)
    make_tiny_model(folder / "model", TinyModelConfig(hidden_size=32, layers=2))
    undisturbed, killed = (Run(RunPaths(folder / name), folder / "model", zygote) for name in ("undisturbed", "killed"))
    undisturbed.train(ranks=ranks, replay=batches, max_steps=steps)
    blows = survive(killed, kills=kills, seed=seed, steps=steps, ranks=ranks, replay=batches)
    same_curve, same_weights = curve(killed) == curve(undisturbed), final_weights(killed) == final_weights(undisturbed)
    return blows, same_curve, same_weights, steps


def table(kills: int, seed: int) -> str:
    """Return all runs as Markdown."""
    lines = [
        "# A trainer that is killed ten times ends as the undisturbed one",
        "",
        f"`python -m benchmarks.killed_trainer --kills {kills} --seed {seed}`; {platform.machine()}, CPU, a tiny model, a checkpoint",
        "every second step, asynchronous. Equal: loss, gradient norm, entropy, learning rate, checksum of the parameters and skipped steps",
        "of every step, and every byte of the last version's files. A blow falls on one rank, which takes the others with it, or on all.",
    ]
    zygote = Zygote()
    try:
        for ranks in (1, 2):
            with TemporaryDirectory() as name:
                blows, same_curve, same_weights, steps = measure(
                    Path(name), zygote, ranks=ranks, kills=kills, seed=seed + ranks
                )
            lost = sum(blow.lost for blow in blows)
            lines += [
                "",
                f"## {ranks} rank{'s' if ranks > 1 else ''}: {steps} steps, {len(blows)} kills",
                "",
                f"Loss curve equal: {'yes' if same_curve else 'NO'}. Final weights equal: {'yes' if same_weights else 'NO'}. "
                f"Steps trained again: {lost}, at most {max(blow.lost for blow in blows)} after a kill; "
                f"{sum(blow.unfinished for blow in blows)} kills left a checkpoint without its manifest.",
                "",
                "| attempt | killed rank | phase | of step | ms after it began | last step trained | next attempt from |",
                "|---:|---|---|---:|---:|---:|---:|",
                *(
                    f"| {b.attempt} | {', '.join(map(str, b.ranks))} | {b.phase} | {b.step} | {b.delay_ms} | {b.reached} | {b.base} |"
                    for b in blows
                ),
            ]
    finally:
        zygote.close()
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    run_page(__doc__, RESULTS, table, kills=10, seed=0)
