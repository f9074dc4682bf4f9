"""Recorded batches of another run as training data, so that two runs train on the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlrun.protocol.files.batch import Batch, BatchError, read_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import artifacts_in_steps
from rlrun.runtime import exit_codes


class Recording:
    """The `rollouts/` folder of another run.

    Args:
        folder: path of the folder.
        steps: required steps.

    Raises:
        RoleError: a step is missing; the message names the first one.
    """

    def __init__(self, folder: Path, steps: range) -> None:
        # If several attempts recorded a step, the last attempt counts.
        self._found = {a.step: a.path for a in artifacts_in_steps(folder)}
        missing = [step for step in steps if step not in self._found]
        if missing:
            have = f"it has {min(self._found)} to {max(self._found)}" if self._found else "the folder has no batch"
            raise RoleError(
                f"orchestrator.replay: {folder} has no batch of step {missing[0]} ({have}); record with recordRollouts, or lower maxSteps",
                exit_codes.CONFIGURATION,
            )

    def batch(self, step: int, *, attempt: int) -> Batch:
        """Return the recorded batch of a step, with this run's attempt."""
        try:
            return dataclasses.replace(read_batch(self._found[step]), attempt=attempt)
        except BatchError as error:
            raise RoleError(f"orchestrator.replay: {error}", exit_codes.DATA) from error
