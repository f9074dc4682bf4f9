"""Replayed run that is killed repeatedly, each attempt in a random phase of a random step, before its last attempt
finishes.

Each attempt must start at the last complete checkpoint, and the result must equal an undisturbed run.
"""

from __future__ import annotations

import hashlib
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from tests.trainer.conftest import Run

EXACT = ("loss", "grad_norm", "entropy", "lr", "param_checksum", "skipped_steps")
PHASES = ("training", "publishing", "saving", "saving")
"""Phases in which a kill may occur; files are written during the step after a save, so `saving` counts twice."""
INTERVAL = 2
LONGEST_DELAY_MS = 200
FURTHEST = 5
"""Steps from an attempt's base to the step of its kill, or one more to reach a save."""


@dataclass(frozen=True)
class Blow:
    """One kill. `base`: expected base step of the next attempt; `reached`: last trained step."""

    attempt: int
    ranks: tuple[int, ...]
    phase: str
    step: int
    delay_ms: int
    reached: int
    base: int
    unfinished: bool
    """Whether a checkpoint has no manifest."""

    @property
    def lost(self) -> int:
        """Return the number of steps that are trained again."""
        return self.reached - self.base


def survive(run: Run, *, kills: int, seed: int, steps: int, ranks: int, replay: Path, **options: Any) -> list[Blow]:
    """Kill a run repeatedly, check the base of every attempt, and let the last attempt finish.

    Args:
        run: run in an empty folder.
        kills: number of killed attempts.
        seed: seed of the kill times.
        steps: steps of the whole run, at least `longest(kills)`.
        ranks: size of the group; a kill hits one rank, which ends the others like torchrun, or all ranks.
        replay: recorded batches.
    """
    rng = random.Random(seed)
    common: dict[str, Any] = {"ranks": ranks, "replay": replay, "max_steps": steps, **options}
    checkpoint = {"interval": INTERVAL, "keep_last": 2}
    blows: list[Blow] = []
    for attempt in range(1, kills + 1):
        base = newest_complete(run.paths)
        phase, delay = rng.choice(PHASES), rng.randrange(LONGEST_DELAY_MS)
        step = base + rng.randint(2, FURTHEST)
        step += step % INTERVAL if phase == "saving" else 0
        assert step < steps, "the run is too short for so many kills"
        targets = rng.choice([(rank,) for rank in range(ranks)] + [tuple(range(ranks))])
        group = run.start(
            attempt=attempt, checkpoint=checkpoint, kill_in=dict.fromkeys(targets, f"{phase}:{step}:{delay}"), **common
        )
        codes = group.wait()
        assert -signal.SIGKILL in [codes[rank] for rank in targets], group.text()
        assert all(codes), group.text()
        assert read_attempt(run.paths.attempt_file(attempt)).base_step == base
        complete = {c.path for c in complete_checkpoints(run.paths)}
        unfinished = any(c.path not in complete for c in run.paths.checkpoints_on_disk())
        reached = max((int(line["step"]) for line in run.metrics()), default=0) if run.paths.metrics.exists() else 0
        blows.append(Blow(attempt, targets, phase, step, delay, reached, newest_complete(run.paths), unfinished))
    run.train(attempt=kills + 1, checkpoint=checkpoint, **common)
    assert read_attempt(run.paths.attempt_file(kills + 1)).base_step == blows[-1].base
    return blows


def longest(kills: int) -> int:
    """Return a number of steps that a run cannot finish before `kills` kills: a kill occurs at the latest one step
    after its target.
    """
    return (FURTHEST + 1) * kills + 2


def newest_complete(paths: RunPaths) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max((checkpoint.step for checkpoint in complete_checkpoints(paths)), default=0)


def curve(run: Run) -> dict[int, dict[str, float]]:
    """Return the exact metrics of each step; the last value counts if a step was trained more than once."""
    return {int(line["step"]): {name: line[name] for name in EXACT} for line in run.metrics()}


def final_weights(run: Run) -> dict[str, str]:
    """Return digests of the files of the newest published version."""
    newest = run.paths.versions_on_disk()[-1].path
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.iterdir())}
