"""Reports of a run: its phase and its metrics, to the orchestrator, to rank 0, to the log and to `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from loguru import logger

from rlrun.protocol.messages.channel import Phase
from rlrun.trainer.channel.run_channel import Channel

_OF_NEXT_STEP: tuple[Phase, ...] = ("training", "waiting_for_batch", "waiting_for_turn")
"""Phases that work for the step after the last one that is done."""


class RunReport:
    """Reports of one rank about a run while it is trained.

    Args:
        channel: to the run's orchestrator, on rank 0.
        tell: gets phase, step and micro-batch of this rank whenever they change.
        label: put before what is logged.
        leads: true on rank 0.
    """

    def __init__(
        self, channel: Channel | None, tell: Callable[[Phase, int, int], None], *, label: str, leads: bool
    ) -> None:
        self._channel, self._tell, self._leads, self.label = channel, tell, leads, label
        self._micro_batch = 0

    def say(self, message: str) -> None:
        """Log a line about the run."""
        logger.info(f"{self.label}{message}")

    def phase(self, phase: Phase, trained: int) -> None:
        """Report that a phase begins, after the step `trained`."""
        self._micro_batch = 0
        self._tell(phase, trained + (phase in _OF_NEXT_STEP), 0)
        if self._channel is not None:
            self._channel.phase(phase)

    def micro_batch(self, trained: int) -> None:
        """Report that the next micro-batch of the step after `trained` begins."""
        self._micro_batch += 1
        self._tell("training", trained + 1, self._micro_batch)
        if self._channel is not None:
            self._channel.part()

    def trained(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        """Report a trained step, on rank 0."""
        if not self._leads:
            return
        self.say(step_summary(step, max_steps, metrics))
        if self._channel is not None:
            self._channel.emit("trained", step, metrics=metrics)


def step_summary(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """The log's line.

    Args:
        step: that was trained.
        max_steps: of the run.
        metrics: of the step, by their names in `metrics.jsonl`.
    """
    return (
        f"step {step}/{max_steps}: loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}, "
        f"lr {metrics['lr']:.3g}, {metrics['perf/throughput']:.0f} tokens/s, step {metrics['time/step']:.2f} s, "
        f"waited {metrics['time/wait_for_batch']:.2f} s"
    )


def append_line(path: Path, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
    """Add a line, where no orchestrator does so. What is not finite is left out.

    Args:
        path: of `metrics.jsonl`.
        step: that was trained.
        attempt: by which.
        metrics: of the step.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    line = json.dumps({"step": step, "attempt": attempt, **finite})
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning(f"{path} misses step {step}: {error}")
