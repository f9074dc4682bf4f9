"""A replayed run that is killed again and again, each attempt in a random phase of a random step, until it is let through to its end.

What must be true however often that happens: each attempt begins at the last complete checkpoint, and the run ends as if nothing had been.
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
"""Where a blow may fall; after a save has begun the files are written beside the next step, so `saving` counts twice."""
INTERVAL = 2
LONGEST_DELAY_MS = 200
FURTHEST = 5
"""Steps from an attempt's base to the step of its blow, or one more to get to a save."""


@dataclass(frozen=True)
class Blow:
    """One kill. `base`: the step that the next attempt has to begin at; `reached`: the last step that was trained."""

    attempt: int
    ranks: tuple[int, ...]
    phase: str
    step: int
    delay_ms: int
    reached: int
    base: int
    unfinished: bool
    """Whether a checkpoint was left without its manifest."""

    @property
    def lost(self) -> int:
        """Steps that are trained again."""
        return self.reached - self.base


def survive(run: Run, *, kills: int, seed: int, steps: int, ranks: int, replay: Path, **options: Any) -> list[Blow]:
    """Kill a run so often and let it end; every attempt's base is checked.

    Args:
        run: in a folder of its own.
        kills: number of attempts that are killed.
        seed: of the moments.
        steps: of the whole run, at least `longest(kills)`.
        ranks: of the group; a blow falls on one of them, which takes the others with it as torchrun does, or on all.
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
    """Steps of a run that cannot end before so many kills: a blow falls at the latest in the step after the one it is meant for."""
    return (FURTHEST + 1) * kills + 2


def newest_complete(paths: RunPaths) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max((checkpoint.step for checkpoint in complete_checkpoints(paths)), default=0)


def curve(run: Run) -> dict[int, dict[str, float]]:
    """The exact metrics of each step, the last value where a step was trained more than once."""
    return {int(line["step"]): {name: line[name] for name in EXACT} for line in run.metrics()}


def final_weights(run: Run) -> dict[str, str]:
    """Digests of the files of the newest published version."""
    newest = run.paths.versions_on_disk()[-1].path
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.iterdir())}
