"""User script that `mypy --strict` checks and the tests run."""

from __future__ import annotations

from rlrun import Run, RunFailedError
from rlrun.runs.blocks import Environment, Model, TinyModel, Trainer


def manifest(name: str) -> Run:
    """Return a run of a tiny model."""
    run = Run(
        name,
        model=Model(tiny=TinyModel(layers=1)),
        environments=[Environment(id="reverse-text", group_size=4)],
        orchestrator={"batch_size": 16},
        trainer=Trainer(replicas=2),
        max_steps=5,
    )
    return run.set("trainer.replicas=1", max_steps=6)


def follow(run: Run) -> list[int]:
    """Return the steps of a running run that have a checkpoint."""
    try:
        run.wait(step=3, timeout=60.0)
    except RunFailedError as error:
        print(error)
    return [checkpoint.step for checkpoint in run.checkpoints()]
